// client.rs: a step of attention from Rust. It declares the functions that it uses and the struct that never changes;
// structs that grow are filled by what `folio info --abi` says, which checks the size of every field that is set.
//
// usage: client PROGRAM
use std::ffi::{c_char, c_void, CStr};
use std::process::{exit, Command};
use std::ptr::{null, null_mut};

type Handle = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    dtype: u32,
    tokens: i64,
    token_stride: i64,
    head_stride: i64,
}

const F32: u32 = 1;
const DECODER: u32 = 0;

extern "C" {
    fn folio_version() -> *const c_char;
    fn folio_last_error() -> *const c_char;
    fn folio_context_create(desc: *const c_void, out: *mut Handle) -> u32;
    fn folio_context_destroy(it: Handle);
    fn folio_attention_create(ctx: Handle, desc: *const c_void, out: *mut Handle) -> u32;
    fn folio_attention_destroy(it: Handle);
    fn folio_kv_cache_create(ctx: Handle, desc: *const c_void, out: *mut Handle) -> u32;
    fn folio_kv_cache_destroy(it: Handle);
    fn folio_batch_create(ctx: Handle, desc: *const c_void, out: *mut Handle) -> u32;
    fn folio_batch_destroy(it: Handle);
    fn folio_batch_add(batch: Handle, seq: *const c_void) -> u32;
    fn folio_plan_create(ctx: Handle, desc: *const c_void, out: *mut Handle) -> u32;
    fn folio_plan_destroy(it: Handle);
    fn folio_plan_update(plan: Handle, batch: Handle, run: *const c_void) -> u32;
    fn folio_attention_forward(plan: Handle, attention: i32, kind: u32, cache: Handle, layer: i32,
                               tensors: *const c_void, run: *const c_void) -> u32;
}

fn text(chars: *const c_char) -> String {
    unsafe { CStr::from_ptr(chars) }.to_string_lossy().into_owned()
}

fn fail(what: String) -> ! {
    eprintln!("{}", what);
    exit(1);
}

fn must(status: u32) {
    if status != 0 {
        fail(format!("status {}: {}", status, text(unsafe { folio_last_error() })));
    }
}

// ---- Structs by what `folio info --abi` prints: "struct NAME: SIZE bytes, ...", then "OFFSET SIZE DECLARATION"

struct Layout {
    size: usize,
    fields: Vec<(String, usize, usize)>,
}

fn layout(abi: &str, name: &str) -> Layout {
    let mut lines = abi.lines().skip_while(|l| !l.starts_with(&format!("struct {}: ", name)));
    let head = lines.next().unwrap_or_else(|| fail(format!("{} is not there", name)));
    let number = |word: Option<&str>| word.and_then(|w| w.parse().ok()).unwrap_or_else(|| fail(head.into()));
    let size = number(head.split(' ').nth(2));
    let fields = lines.skip(1).take_while(|l| !l.is_empty()).map(|l| {
        let words: Vec<&str> = l.split_whitespace().collect();
        let field = words[words.len() - 1].trim_start_matches('*');
        (field.into(), number(words.first().copied()), number(words.get(1).copied()))
    }).collect();
    Layout { size, fields }
}

struct Struct {
    name: &'static str,
    layout: Layout,
    memory: Vec<u64>,
}

impl Struct {
    fn new(abi: &str, name: &'static str) -> Self {
        let layout = layout(abi, name);
        let mut it = Struct { name, memory: vec![0; (layout.size + 7) / 8], layout };
        it.set("struct_size", it.layout.size);
        it
    }

    fn set<T: Copy>(&mut self, field: &str, value: T) {
        let (_, offset, size) = self.layout.fields.iter().find(|f| f.0 == field)
            .unwrap_or_else(|| fail(format!("{}.{} is not there", self.name, field)));
        if std::mem::size_of::<T>() != *size {
            fail(format!("{}.{} has {} bytes there, {} here", self.name, field, size, std::mem::size_of::<T>()));
        }
        unsafe { self.memory.as_mut_ptr().cast::<u8>().add(*offset).cast::<T>().write_unaligned(value) }
    }

    // Sets several fields of one type.
    fn all<T: Copy>(mut self, values: &[(&str, T)]) -> Self {
        values.iter().for_each(|(field, value)| self.set(field, *value));
        self
    }

    fn at(&self) -> *const c_void {
        self.memory.as_ptr().cast()
    }
}

// ---- A step

const HEADS: usize = 2;
const SIZE: usize = 8;
const TOKENS: usize = 5;

fn number(i: usize) -> f32 {
    ((i * 37 + 11) % 128) as f32 / 64.0 - 1.0
}

fn by_hand(q: &[f32], k: &[f32], v: &[f32], token: usize, head: usize, dim: usize) -> f64 {
    let dot = |s: usize| (0..SIZE).map(|d| f64::from(q[(token * HEADS + head) * SIZE + d]) *
                                           f64::from(k[s * SIZE + d])).sum::<f64>();
    let weights: Vec<f64> = (0..=token).map(|s| (dot(s) / (SIZE as f64).sqrt()).exp()).collect();
    (0..=token).map(|s| weights[s] * f64::from(v[s * SIZE + dim])).sum::<f64>() / weights.iter().sum::<f64>()
}

fn tensor(of: &mut [f32]) -> Tensor {
    Tensor { data: of.as_mut_ptr().cast(), dtype: F32, tokens: TOKENS as i64, token_stride: 0, head_stride: 0 }
}

// A prompt through scattered blocks; the largest error.
unsafe fn attend(abi: &str) -> f64 {
    let (heads, size, tokens) = (HEADS as i32, SIZE as i32, TOKENS as i64);
    let (mut ctx, mut attention, mut cache, mut batch, mut plan) =
        (null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
    let desc = Struct::new(abi, "folio_context_desc").all(&[("num_threads", 1i32)]);
    must(folio_context_create(desc.at(), &mut ctx));
    let desc = Struct::new(abi, "folio_attention_desc")
        .all(&[("num_heads", heads), ("num_kv_heads", 1), ("k_head_size", size)]).all(&[("dtype", F32)]);
    must(folio_attention_create(ctx, desc.at(), &mut attention));
    let desc = Struct::new(abi, "folio_kv_cache_desc").all(&[("num_blocks", 4i64)]).all(&[("dtype", F32)])
        .all(&[("num_layers", 1i32), ("block_size", 2), ("num_kv_heads", 1), ("k_head_size", size)]);
    must(folio_kv_cache_create(ctx, desc.at(), &mut cache));
    let desc = Struct::new(abi, "folio_batch_desc").all(&[("block_size", 2i32)]);
    must(folio_batch_create(ctx, desc.at(), &mut batch));
    let list: *const Handle = &attention;
    let desc = Struct::new(abi, "folio_plan_desc").all(&[("attentions", list)])
        .all(&[("num_attentions", 1i32), ("block_size", 2)])
        .all(&[("num_blocks", 4i64), ("max_seqs", 1), ("max_query_tokens", tokens), ("max_seq_len", 8)]);
    must(folio_plan_create(ctx, desc.at(), &mut plan));
    let table = [3i32, 0, 2];
    let seq = Struct::new(abi, "folio_batch_seq").all(&[("block_table", table.as_ptr())])
        .all(&[("query_len", tokens), ("seq_len", tokens), ("num_blocks", 3)]);
    must(folio_batch_add(batch, seq.at()));
    must(folio_plan_update(plan, batch, null()));

    let mut q: Vec<f32> = (0..TOKENS * HEADS * SIZE).map(number).collect();
    let mut k: Vec<f32> = (0..TOKENS * SIZE).map(|i| number(i + 1000)).collect();
    let mut v: Vec<f32> = (0..TOKENS * SIZE).map(|i| number(i + 2000)).collect();
    let mut out = vec![0f32; q.len()];
    let tensors = Struct::new(abi, "folio_tensors")
        .all(&[("q", tensor(&mut q)), ("k", tensor(&mut k)), ("v", tensor(&mut v)), ("out", tensor(&mut out))]);
    must(folio_attention_forward(plan, 0, DECODER, cache, 0, tensors.at(), null()));
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_kv_cache_destroy(cache);
    folio_attention_destroy(attention);
    folio_context_destroy(ctx);

    let want = |i: usize| by_hand(&q, &k, &v, i / SIZE / HEADS, i / SIZE % HEADS, i % SIZE);
    out.iter().enumerate().map(|(i, x)| (f64::from(*x) - want(i)).abs()).fold(0.0, f64::max)
}

fn main() {
    let program = std::env::args().nth(1).unwrap_or_else(|| fail("usage: client PROGRAM".into()));
    let output = Command::new(program).args(["info", "--abi"]).output().expect("the program runs");
    let abi = String::from_utf8_lossy(&output.stdout);
    let there = layout(&abi, "folio_tensor");
    if there.size != std::mem::size_of::<Tensor>() || there.fields[2] != ("tokens".into(), 16, 8) {
        fail("folio_tensor is not as declared here".into());
    }
    let error = unsafe { attend(&abi) };
    if !(error < 1e-6) {
        fail(format!("attention from Rust is off by {}", error));
    }
    println!("folio {} from Rust: attention is off by {:.1e}", text(unsafe { folio_version() }), error);
}
