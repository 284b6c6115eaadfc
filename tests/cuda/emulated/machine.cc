/*
 * machine.cc: fibers, the scheduler, barriers and copies. A fiber runs until it has to wait; then its warp's others run, and
 * when all wait, or a draw says so, another warp.
 */
#include "machine_inside.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>

constexpr int64_t MOST_STEPS = 200000000;
enum { STACK_BYTES = 128 << 10, GUARD_BYTES = 4096, TAIL_BYTES = 1024, NAMED_BARRIERS = 16 };

/* What mbarriers are, in their 8 bytes. */
struct barrier_word {
    uint64_t magic : 20, phase : 1, expected : 10, pending : 10;
    int64_t bytes : 23;
};
static_assert(sizeof(barrier_word) == 8, "it takes the place of the real one");
enum { BARRIER_MAGIC = 0xba221 };

struct named_barrier {
    int arrived, threads;
};

struct machine_block {
    int index;
    char *memory;
    size_t shared_bytes;
    int free_registers; /* of a thread of a warp: sums over warps */
    std::vector<machine_warp> warps;
    std::vector<machine_lane *> waiting;
    named_barrier named[NAMED_BARRIERS];
    int copies; /* on their way */
    int alive;  /* threads */
};

struct copy {
    machine_block *block;
    std::vector<machine_piece> pieces;
    uint32_t barrier;
    int bytes;
};

struct sleeper {
    machine_lane *lane;
    int64_t until;
};

/* How a launch behaves: drawn for each. */
struct manners {
    uint32_t land, pause, sleep; /* one in so many; longest sleep in steps */
    uint32_t slow;               /* one warp in so many is slow; 0: none    */
};

dim3 threadIdx, blockIdx, blockDim, gridDim;
char (*block_memory)[];
machine_result machine_last;

static uint64_t random_state = 1;
static std::vector<machine_block> blocks;
static std::vector<machine_lane> all_lanes;
static std::vector<copy> copies;
static std::vector<sleeper> sleepers;
static std::vector<bool> is_slow;
static manners how;
static char *stacks;
static size_t num_stacks;
static machine_lane *current;
static jmp_buf scheduler;
static const std::function<void()> *body;

/* Keys of lanes that wait: addresses of barriers, or these. */
enum : uint64_t { KEY_REGISTERS = 1ull << 32, KEY_NAMED = 2ull << 32 };

machine_lane *machine_current(void) { return current; }

/* ---- draws and failures ---- */

void machine_seed(uint64_t seed) { random_state = seed * 0x9e3779b97f4a7c15ull + 1; }

uint32_t machine_draw(uint32_t n)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545f4914f6cdd1dull >> 32) * n >> 32);
}

static const char *short_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash != NULL ? slash + 1 : file;
}

static void tell(const char *format, ...)
{
    size_t used = strlen(machine_last.failure), room = sizeof machine_last.failure - used;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(machine_last.failure + used, room, format, arguments);
    va_end(arguments);
}

void machine_fail(place at, const char *format, ...)
{
    if (current != NULL)
        tell("block %u warp %d lane %d at %s:%d: ", blockIdx.x, current->warp->index,
             current->index, short_name(at.file), at.line);
    size_t used = strlen(machine_last.failure), room = sizeof machine_last.failure - used;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(machine_last.failure + used, room, format, arguments);
    va_end(arguments);
    _longjmp(scheduler, 1);
}

/* ---- fibers ---- */

[[noreturn]] static void resume(machine_warp *w)
{
    int turn = (int)machine_draw(LANES);
    uint32_t ready = w->ready, turned = turn == 0 ? ready : ready >> turn | ready << (LANES - turn);
    current = &w->lanes[(__builtin_ctz(turned) + turn) % LANES];
    threadIdx.x = (unsigned)(w->index * LANES + current->index);
    _longjmp(current->context, 1);
}

/* The lane at hand stops; its warp goes on if it can. */
static void stop(bool leaves_warp)
{
    machine_lane *me = current;
    if (_setjmp(me->context) != 0) return;
    if (leaves_warp || me->warp->ready == 0) _longjmp(scheduler, 1);
    resume(me->warp);
}

static void wait_for(const char *what, uint64_t key, uint32_t parity, place at)
{
    machine_lane *me = current;
    me->waits_for = what;
    me->key = key;
    me->parity = parity;
    me->at = at;
    me->warp->ready &= ~(1u << me->index);
    me->warp->block->waiting.push_back(me);
    stop(false);
}

static void wake(machine_block *b, uint64_t key)
{
    for (size_t i = 0; i < b->waiting.size();) {
        machine_lane *lane = b->waiting[i];
        if (lane->key != key) {
            i++;
            continue;
        }
        lane->warp->ready |= 1u << lane->index;
        b->waiting[i] = b->waiting.back();
        b->waiting.pop_back();
    }
}

void machine_pause(place at)
{
    current->at = at;
    if (machine_draw(how.pause) == 0) stop(true);
}

static int64_t now; /* in steps of the scheduler */

void machine_sleep(place at)
{
    current->waits_for = "time";
    current->at = at;
    current->warp->ready &= ~(1u << current->index);
    sleepers.push_back({current, now + 1 + machine_draw(how.sleep)});
    stop(false);
}

void machine_meet(const char *what, machine_act *act, void *mine, place at)
{
    machine_lane *me = current;
    machine_warp *w = me->warp;
    if (w->num_met == 0) {
        w->what = what;
        w->at = at;
    } else if (w->at.line != at.line || strcmp(w->at.file, at.file) != 0) {
        machine_fail(at, "%s, while other lanes of the warp are at %s:%d: %s", what,
                     short_name(w->at.file), w->at.line, w->what);
    }
    w->given[me->index] = mine;
    if (++w->num_met < LANES) {
        me->waits_for = what;
        me->key = 0;
        me->at = at;
        w->ready &= ~(1u << me->index);
        stop(false);
        return;
    }
    w->num_met = 0;
    const char *slowly = strstr(at.function, "slowly");
    if (slowly != NULL && (slowly[6] == '\0' || slowly[6] == '<')) machine_last.slow_ways++;
    if (act != NULL) act(w, w->given);
    w->ready = ~0u;
    machine_pause(at);
}

static void enter()
{
    machine_lane *me = current;
    if (_setjmp(me->context) == 0) _longjmp(scheduler, 1);
    (*body)();
    machine_block *b = current->warp->block;
    if (--b->alive == 0 && b->copies > 0)
        machine_fail(place::here(), "the block ends while %d copies are on their way", b->copies);
    current->is_done = true;
    current->warp->ready &= ~(1u << current->index);
    if (current->warp->ready == 0) _longjmp(scheduler, 1);
    resume(current->warp);
}

static void start_lane(machine_lane *lane, char *stack)
{
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack + GUARD_BYTES;
    context.uc_stack.ss_size = STACK_BYTES - GUARD_BYTES;
    context.uc_link = NULL;
    makecontext(&context, enter, 0);
    current = lane;
    if (_setjmp(scheduler) == 0) setcontext(&context);
    current = NULL;
}

/* ---- shared memory and barriers ---- */

char *machine_shared(uint32_t address, int bytes, place at)
{
    const machine_block *b = current->warp->block;
    if (address < SHARED_AT || address + (size_t)bytes > SHARED_AT + b->shared_bytes)
        machine_fail(at, "%d bytes at 0x%x are outside of shared memory, [0x%x, 0x%zx)", bytes,
                     address, SHARED_AT, SHARED_AT + b->shared_bytes);
    return b->memory + (address - SHARED_AT);
}

uint32_t machine_address(const void *p)
{
    return SHARED_AT + (uint32_t)((const char *)p - current->warp->block->memory);
}

static barrier_word *barrier_in(machine_block *b, uint32_t barrier)
{
    return (barrier_word *)(void *)(b->memory + (barrier - SHARED_AT));
}

static barrier_word *barrier_at(uint32_t barrier, place at)
{
    barrier_word *w = (barrier_word *)(void *)machine_shared(barrier, 8, at);
    if (barrier % 8 != 0 || w->magic != BARRIER_MAGIC)
        machine_fail(at, "0x%x is no mbarrier", barrier);
    return w;
}

void machine_barrier_init(uint32_t barrier, int arrivals, place at)
{
    barrier_word *w = (barrier_word *)(void *)machine_shared(barrier, 8, at);
    *w = {BARRIER_MAGIC, 0, (uint64_t)arrivals, (uint64_t)arrivals, 0};
}

/* True: it was the phase's last arrival or byte. */
static bool end_phase(machine_block *b, uint32_t barrier, barrier_word *w)
{
    if (w->pending != 0 || w->bytes != 0) return false;
    w->phase ^= 1;
    w->pending = w->expected;
    wake(b, barrier);
    return true;
}

void machine_barrier_arrive(uint32_t barrier, int bytes, place at)
{
    machine_pause(at);
    barrier_word *w = barrier_at(barrier, at);
    if (w->pending == 0)
        machine_fail(at, "more than the %d arrivals of a phase at mbarrier 0x%x", (int)w->expected,
                     barrier);
    w->pending--;
    w->bytes += bytes;
    bool is_last = end_phase(current->warp->block, barrier, w);
    if (is_last && machine_draw(2) == 0) machine_sleep(at); /* those who waited overtake this one */
    else machine_pause(at);
}

void machine_barrier_wait(uint32_t barrier, uint32_t parity, place at)
{
    if (parity > 1) machine_fail(at, "parity %u of mbarrier 0x%x", parity, barrier);
    while (barrier_at(barrier, at)->phase == parity) wait_for("mbarrier", barrier, parity, at);
}

void machine_named_barrier(int number, int threads, bool waits, place at)
{
    machine_block *b = current->warp->block;
    if (number < 0 || number >= NAMED_BARRIERS || threads % LANES != 0)
        machine_fail(at, "barrier %d of %d threads", number, threads);
    named_barrier *n = &b->named[number];
    if (n->arrived > 0 && n->threads != threads)
        machine_fail(at, "barrier %d of %d threads, while others wait there for %d", number,
                     threads, n->threads);
    n->threads = threads;
    if (++n->arrived == threads) {
        n->arrived = 0;
        wake(b, KEY_NAMED + (uint64_t)number);
    } else if (waits) wait_for("bar.sync", KEY_NAMED + (uint64_t)number, (uint32_t)threads, at);
}

/* ---- copies ---- */

void machine_copy(const machine_piece *pieces, int count, uint32_t barrier, place at)
{
    barrier_at(barrier, at);
    copy c = {current->warp->block, {pieces, pieces + count}, barrier, 0};
    for (const machine_piece &p : c.pieces) {
        if (p.to % 16 != 0 || p.bytes % 16 != 0 || p.bytes <= 0 || (uintptr_t)p.from % 16 != 0)
            machine_fail(at, "a copy of %d bytes from %p to 0x%x: 16-byte units are needed",
                         p.bytes, (const void *)p.from, p.to);
        memset(machine_shared(p.to, p.bytes, at), 0xff, (size_t)p.bytes); /* NaN until it lands */
        c.bytes += p.bytes;
    }
    c.block->copies++;
    copies.push_back(c);
    machine_pause(at);
}

static void land()
{
    size_t i = machine_draw((uint32_t)copies.size());
    copy c = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    for (const machine_piece &p : c.pieces) {
        char *to = c.block->memory + (p.to - SHARED_AT);
        if (p.from != NULL) memcpy(to, p.from, (size_t)p.bytes);
        else memset(to, 0, (size_t)p.bytes);
    }
    barrier_word *w = barrier_in(c.block, c.barrier);
    w->bytes -= c.bytes;
    end_phase(c.block, c.barrier, w);
    c.block->copies--;
}

/* ---- registers ---- */

struct register_change {
    int count;
    bool takes, is_done;
    place at;
};

static void change_registers(machine_warp *w, void *const *lanes)
{
    register_change *first = (register_change *)lanes[0];
    int more = first->count - w->registers;
    if (first->count % 8 != 0 || first->count < 24 || first->count > 256 ||
        (more != 0 && first->takes != (more > 0)))
        machine_fail(first->at, "from %d registers to %d", w->registers, first->count);
    bool is_done = more <= w->block->free_registers;
    if (is_done) {
        w->block->free_registers -= more;
        w->registers = first->count;
        if (more < 0) wake(w->block, KEY_REGISTERS);
    }
    for (int i = 0; i < LANES; i++) ((register_change *)lanes[i])->is_done = is_done;
}

void machine_set_registers(int count, bool takes, place at)
{
    register_change change = {count, takes, false, at};
    for (;;) {
        machine_meet("setmaxnreg", change_registers, &change, at);
        if (change.is_done) return;
        const machine_warp *w = current->warp;
        if (count - w->registers > w->block->free_registers)
            wait_for("registers", KEY_REGISTERS, 0, at);
    }
}

/* ---- the scheduler ---- */

static void draw_manners()
{
    static const uint32_t lands[] = {1, 4, 30}, pauses[] = {2, 8, 40}, sleeps[] = {10, 60, 400},
                          slows[] = {0, 0, 2, 5};
    how = {lands[machine_draw(3)], pauses[machine_draw(3)], sleeps[machine_draw(3)],
           slows[machine_draw(4)]};
}

/* A warp that can run; NULL: there is none. Slow ones are passed over, most of the time. */
static machine_warp *draw_warp()
{
    uint32_t per_block = (uint32_t)blocks[0].warps.size(),
             count = (uint32_t)blocks.size() * per_block, start = machine_draw(count);
    machine_warp *slow = NULL;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t n = start + i < count ? start + i : start + i - count;
        machine_warp *w = &blocks[n / per_block].warps[n % per_block];
        if (w->ready == 0) continue;
        if (!is_slow[n] || machine_draw(16) == 0) return w;
        slow = w;
    }
    return slow;
}

static void redraw_slow()
{
    for (size_t i = 0; i < is_slow.size(); i++)
        is_slow[i] = how.slow > 0 && machine_draw(how.slow) == 0;
}

/* Those whose time has come; false: there are no sleepers. */
static bool wake_sleepers(bool at_once)
{
    if (sleepers.empty()) return false;
    int64_t soonest = INT64_MAX;
    for (const sleeper &s : sleepers) soonest = std::min(soonest, s.until);
    if (at_once) now = std::max(now, soonest);
    if (soonest > now) return true;
    for (size_t i = 0; i < sleepers.size();) {
        if (sleepers[i].until > now) {
            i++;
            continue;
        }
        sleepers[i].lane->warp->ready |= 1u << sleepers[i].lane->index;
        sleepers[i] = sleepers.back();
        sleepers.pop_back();
    }
    return true;
}

/* Until none of its lanes can, or a draw says so. */
static void run_warp(machine_warp *w)
{
    blockIdx.x = (unsigned)w->block->index;
    block_memory = (char(*)[])w->block->memory;
    if (_setjmp(scheduler) == 0) resume(w);
    current = NULL;
}

/* Until nothing can run any more. */
static void run_all()
{
    for (;;) {
        if (++now > MOST_STEPS) return tell("it runs for ever");
        if (now % 512 == 1) redraw_slow();
        if (!copies.empty() && machine_draw(how.land) == 0) land();
        wake_sleepers(false);
        machine_warp *w = draw_warp();
        if (w == NULL && !copies.empty()) land();
        else if (w == NULL && !wake_sleepers(true)) return;
        if (w == NULL) continue;
        run_warp(w);
        if (machine_last.failure[0] != '\0') return;
    }
}

/* ---- a launch ---- */

static void make_stacks(size_t count)
{
    if (count <= num_stacks) return;
    if (stacks != NULL) munmap(stacks, num_stacks * STACK_BYTES);
    stacks = (char *)mmap(NULL, count * STACK_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    for (size_t i = 0; i < count; i++) mprotect(stacks + i * STACK_BYTES, GUARD_BYTES, PROT_NONE);
    num_stacks = count;
}

static void make_block(machine_block *b, int index, int warps, size_t shared_bytes, int registers)
{
    *b = {};
    b->index = index;
    b->shared_bytes = shared_bytes;
    b->alive = warps * LANES;
    b->memory = (char *)aligned_alloc(1024, (shared_bytes + TAIL_BYTES + 1023) / 1024 * 1024);
    memset(b->memory, 0xff, shared_bytes + TAIL_BYTES); /* NaN in every type */
    b->warps.resize((size_t)warps);
    for (int i = 0; i < warps; i++) {
        machine_warp *w = &b->warps[(size_t)i];
        w->block = b;
        w->index = i;
        w->ready = ~0u;
        w->registers = registers;
        w->lanes = &all_lanes[(size_t)(index * warps + i) * LANES];
        for (int lane = 0; lane < LANES; lane++) {
            w->lanes[lane].warp = w;
            w->lanes[lane].index = lane;
        }
    }
}

/* One line for each place of each warp where lanes wait. */
static void tell_waiting(const machine_block *b)
{
    for (const machine_warp &w : b->warps) {
        uint32_t told = 0;
        for (int i = 0; i < LANES; i++) {
            const machine_lane *lane = &w.lanes[i];
            if (lane->is_done || told >> i & 1) continue;
            uint32_t same = 0;
            for (int j = i; j < LANES; j++) {
                const machine_lane *other = &w.lanes[j];
                bool is_same = !other->is_done && other->at.line == lane->at.line &&
                               other->at.file == lane->at.file && other->key == lane->key;
                same |= (uint32_t)is_same << j;
            }
            told |= same;
            tell("\n  block %d warp %d lanes %08x: %s", b->index, w.index, same, lane->waits_for);
            if (lane->key > 0 && lane->key < KEY_REGISTERS) {
                const barrier_word *word = barrier_in((machine_block *)b, (uint32_t)lane->key);
                tell(" 0x%x parity %u (%d of %d arrivals and %d bytes are missing)",
                     (unsigned)lane->key, lane->parity, (int)word->pending, (int)word->expected,
                     (int)word->bytes);
            }
            tell(" at %s:%d", short_name(lane->at.file), lane->at.line);
        }
    }
}

/* What must be so when all threads have ended. */
static void check_end()
{
    bool is_stuck = false;
    for (const machine_lane &lane : all_lanes) is_stuck |= !lane.is_done;
    if (is_stuck) {
        tell("deadlock:");
        for (const machine_block &b : blocks) tell_waiting(&b);
        return;
    }
    for (const machine_block &b : blocks) {
        for (int i = 0; i < TAIL_BYTES; i++)
            if ((unsigned char)b.memory[b.shared_bytes + (size_t)i] != 0xff) {
                tell("block %d wrote %d bytes past its shared memory", b.index, i);
                return;
            }
        for (const machine_warp &w : b.warps) {
            const char *wrong = products_end(&w, &b.warps[(size_t)w.index / 4 * 4]);
            if (wrong != NULL) tell("block %d warp %d: %s", b.index, w.index, wrong);
            if (wrong != NULL) return;
        }
    }
}

void machine_launch(const std::function<void()> &thread, int num_blocks, int threads,
                    size_t shared_bytes, int registers)
{
    machine_last = {};
    int warps = threads / LANES;
    all_lanes.assign((size_t)(num_blocks * threads), machine_lane{});
    blocks.clear();
    blocks.resize((size_t)num_blocks);
    make_stacks(all_lanes.size());
    for (int i = 0; i < num_blocks; i++)
        make_block(&blocks[(size_t)i], i, warps, shared_bytes, registers);
    copies.clear();
    sleepers.clear();
    is_slow.assign((size_t)(num_blocks * warps), false);
    now = 0;
    draw_manners();
    body = &thread;
    gridDim.x = (unsigned)num_blocks;
    blockDim.x = (unsigned)threads;
    for (size_t i = 0; i < all_lanes.size(); i++)
        start_lane(&all_lanes[i], stacks + i * STACK_BYTES);
    run_all();
    machine_last.steps = now;
    if (machine_last.failure[0] == '\0') check_end();
    for (machine_block &b : blocks) free(b.memory);
}
