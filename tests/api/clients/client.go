// client.go: a step of attention from Go, through cgo and the header itself. Structs that hold pointers lie in C's
// memory, as cgo asks for.
package main

/*
#include <folio/folio.h>
#include <stdlib.h>

static void *folio_new(size_t size)
{
    size_t *it = calloc(1, size);
    if (it) *it = size;
    return it;
}
#define NEW(type) static type *new_##type(void) { return folio_new(sizeof(type)); }
NEW(folio_context_desc)
NEW(folio_attention_desc)
NEW(folio_kv_cache_desc)
NEW(folio_batch_desc)
NEW(folio_batch_seq)
NEW(folio_plan_desc)
NEW(folio_tensors)
*/
import "C"

import (
	"fmt"
	"math"
	"os"
	"unsafe"
)

const heads, size, tokens = 2, 8, 5

func must(status C.folio_status) {
	if status != C.FOLIO_OK {
		fmt.Fprintf(os.Stderr, "%s: %s\n", C.GoString(C.folio_status_name(status)), C.GoString(C.folio_last_error()))
		os.Exit(1)
	}
}

func number(i int) float32 { return float32((i*37+11)%128)/64 - 1 }

// floats has n numbers in C's memory, made from the first on.
func floats(n, first int) []float32 {
	memory := (*[1 << 20]float32)(C.calloc(C.size_t(n), 4))[:n:n]
	for i := range memory {
		memory[i] = number(first + i)
	}
	return memory
}

func tensor(of []float32) C.folio_tensor {
	return C.folio_tensor{data: unsafe.Pointer(&of[0]), dtype: C.FOLIO_F32, tokens: tokens}
}

func byHand(q, k, v []float32, token, head, dim int) float64 {
	sum, weights := 0.0, 0.0
	for s := 0; s <= token; s++ {
		dot := 0.0
		for d := 0; d < size; d++ {
			dot += float64(q[(token*heads+head)*size+d]) * float64(k[s*size+d])
		}
		weight := math.Exp(dot / math.Sqrt(size))
		weights += weight
		sum += weight * float64(v[s*size+dim])
	}
	return sum / weights
}

func main() {
	var ctx *C.folio_context
	var attention *C.folio_attention
	var cache *C.folio_kv_cache
	var batch *C.folio_batch
	var plan *C.folio_plan

	c := C.new_folio_context_desc()
	c.num_threads = 1
	must(C.folio_context_create(c, &ctx))
	a := C.new_folio_attention_desc()
	a.num_heads, a.num_kv_heads, a.k_head_size, a.dtype = heads, 1, size, C.FOLIO_F32
	must(C.folio_attention_create(ctx, a, &attention))
	k := C.new_folio_kv_cache_desc()
	k.num_layers, k.num_blocks, k.block_size = 1, 4, 2
	k.num_kv_heads, k.k_head_size, k.dtype = 1, size, C.FOLIO_F32
	must(C.folio_kv_cache_create(ctx, k, &cache))
	b := C.new_folio_batch_desc()
	b.block_size = 2
	must(C.folio_batch_create(ctx, b, &batch))
	list := (**C.folio_attention)(C.malloc(8))
	*list = attention
	p := C.new_folio_plan_desc()
	p.attentions, p.num_attentions, p.block_size, p.num_blocks = list, 1, 2, 4
	p.max_seqs, p.max_query_tokens, p.max_seq_len = 1, tokens, 8
	must(C.folio_plan_create(ctx, p, &plan))
	table := (*[3]C.int32_t)(C.malloc(12))
	*table = [3]C.int32_t{3, 0, 2}
	s := C.new_folio_batch_seq()
	s.query_len, s.seq_len, s.block_table, s.num_blocks = tokens, tokens, &table[0], 3
	must(C.folio_batch_add(batch, s))
	must(C.folio_plan_update(plan, batch, nil))

	q, key, value := floats(tokens*heads*size, 0), floats(tokens*size, 1000), floats(tokens*size, 2000)
	out := floats(tokens*heads*size, 0)
	t := C.new_folio_tensors()
	t.q, t.k, t.v, t.out = tensor(q), tensor(key), tensor(value), tensor(out)
	must(C.folio_attention_forward(plan, 0, C.FOLIO_ATTENTION_DECODER, cache, 0, t, nil))
	C.folio_plan_destroy(plan)
	C.folio_batch_destroy(batch)
	C.folio_kv_cache_destroy(cache)
	C.folio_attention_destroy(attention)
	C.folio_context_destroy(ctx)

	worst := 0.0
	for i := range out {
		want := byHand(q, key, value, i/size/heads, i/size%heads, i%size)
		worst = math.Max(worst, math.Abs(float64(out[i])-want))
	}
	if !(worst < 1e-6) {
		fmt.Fprintf(os.Stderr, "attention from Go is off by %g\n", worst)
		os.Exit(1)
	}
	fmt.Printf("folio %s from Go: attention is off by %.1e\n", C.GoString(C.folio_version()), worst)
}
