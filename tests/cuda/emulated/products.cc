/*
 * products.cc: matrix products of a warpgroup, each of its warps by itself: 16 rows. Operands are read when a product is computed:
 * as soon as its group is committed, or not before it is awaited, as drawn. Its sums are NaN in the lanes' registers until
 * then, and must not be touched.
 */
#include "machine_inside.h"

#include "core/dtype.h"

#include <string.h>

/* In place of sums that are on their way: a NaN that nothing else makes. */
constexpr uint32_t POISON = 0x7fc0dead;

void machine_poison(float *x, int count)
{
    for (int i = 0; i < count; i++) memcpy(&x[i], &POISON, sizeof POISON);
}

/* ---- operands ---- */

static const float *widened(bool is_bf16)
{
    static float numbers[2][65536];
    static bool is_made = false;
    for (uint32_t i = 0; i < 65536 && !is_made; i++) {
        numbers[0][i] = f16_to_f32((uint16_t)i);
        numbers[1][i] = bf16_to_f32((uint16_t)i);
    }
    is_made = true;
    return numbers[is_bf16];
}

/* A matrix descriptor: its start, bytes from a panel to the next and from 8 rows to the next; bytes of a panel's rows. */
struct matrix {
    uint32_t start, panel, group, row;
};

static matrix matrix_of(uint64_t word, place at)
{
    if (word >> 62 == 0 || (word >> 49 & 7) != 0)
        machine_fail(at, "matrix %llx is not swizzled", (unsigned long long)word);
    return {(uint32_t)(word & 0x3fff) << 4, (uint32_t)(word >> 16 & 0x3fff) << 4,
            (uint32_t)(word >> 32 & 0x3fff) << 4, 256u >> (word >> 62)};
}

/* 8 numbers of row `row`, whose 16-byte unit is XORed with bits of its own address. */
static const uint16_t *unit_at(const matrix &m, uint32_t offset, place at)
{
    uint32_t address = m.start + offset;
    address ^= (address >> 7 & (m.row / 16 - 1)) << 4;
    return (const uint16_t *)(const void *)machine_shared(address, 16, at);
}

/* x[i][0 .. 15] of rows from `first` on: neighbours lie along the 16. */
template <class PUT>
static void read_rows(const matrix &m, int first, int rows, bool is_bf16, place at, PUT put)
{
    const float *wide = widened(is_bf16);
    for (int i = 0; i < rows; i++) {
        uint32_t row = (uint32_t)(first + i), offset = row / 8 * m.group + row % 8 * m.row;
        for (int half = 0; half < 2; half++) {
            const uint16_t *unit = unit_at(m, offset + (uint32_t)half * 16, at);
            for (int j = 0; j < 8; j++) put(i, half * 8 + j) = wide[unit[j]];
        }
    }
}

static void read_columns(const matrix &m, int n, bool is_bf16, place at, float (*b)[256])
{
    const float *wide = widened(is_bf16);
    for (uint32_t k = 0; k < 16; k++)
        for (uint32_t i = 0; i < (uint32_t)n; i += 8) {
            uint32_t numbers = m.row / 2, offset = i / numbers * m.panel + i % numbers * 2;
            offset += k / 8 * m.group + k % 8 * m.row;
            const uint16_t *unit = unit_at(m, offset, at);
            for (int j = 0; j < 8; j++) b[k][i + (uint32_t)j] = wide[unit[j]];
        }
}

/* Factors in registers, as mma.m16n8k16 has them. */
static void read_registers(const uint32_t *const *lanes, bool is_bf16, float (*a)[16])
{
    const float *wide = widened(is_bf16);
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i % 2 * 8, k = i / 2 * 8 + lane % 4 * 2;
            a[row][k] = wide[(uint16_t)lanes[lane][i]];
            a[row][k + 1] = wide[lanes[lane][i] >> 16];
        }
}

/* ---- a product ---- */

typedef float eight __attribute__((vector_size(32), aligned(4)));

/* sums[16][n] += a[16][16] b[16][n]: four rows by 16 columns at a time. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=haswell", "default")))
#endif
static void
multiply_add(float (*sums)[256], const float (*a)[16], const float (*b)[256], int n)
{
    for (int row = 0; row < 16; row += 4)
        for (int column = 0; column < n; column += 16) {
            eight x[4][2];
            for (int i = 0; i < 4; i++) memcpy(x[i], &sums[row + i][column], sizeof x[i]);
            for (int k = 0; k < 16; k++) {
                eight y[2];
                memcpy(y, &b[k][column], sizeof y);
                for (int i = 0; i < 4; i++) {
                    x[i][0] += a[row + i][k] * y[0];
                    x[i][1] += a[row + i][k] * y[1];
                }
            }
            for (int i = 0; i < 4; i++) memcpy(&sums[row + i][column], x[i], sizeof x[i]);
        }
}

static void compute(machine_warp *w, const machine_issued &issued)
{
    alignas(32) float a[16][16];
    alignas(32) static float b[16][256];
    const machine_product &p = issued.product;
    place at = issued.at;
    float(*sums)[256] = w->flights[issued.flight].sums;
    if (p.a_registers != NULL) read_registers(issued.a, p.is_bf16, a);
    else
        read_rows(matrix_of(p.a, at), w->index % 4 * 16, 16, p.is_bf16, at,
                  [&](int row, int k) -> float & { return a[row][k]; });
    matrix m = matrix_of(p.b, at);
    if (p.b_by_columns) read_columns(m, p.n, p.is_bf16, at, b);
    else
        read_rows(m, 0, p.n, p.is_bf16, at,
                  [&](int column, int k) -> float & { return b[k][column]; });
    for (int row = 0; row < 16 && !p.adds; row++) memset(sums[row], 0, sizeof sums[row]);
    multiply_add(sums, a, b, p.n);
}

/* All up to number `past`. */
static void compute_until(machine_warp *w, int64_t past)
{
    for (; w->num_computed < past; w->num_computed++)
        compute(w, w->issued[(size_t)(w->num_computed - w->first)]);
}

/* ---- flights ---- */

/* Where a lane has sum i of 4 neighbours j. */
static float *sum_of(machine_flight *f, int lane, int j)
{
    return &f->sums[lane / 4 + j / 2 % 2 * 8][j / 4 * 8 + lane % 4 * 2 + j % 2];
}

/* The flight of the sums that a product adds to. */
static int flight_of(machine_warp *w, const machine_issued *issued, int lane, float *sums, place at)
{
    int count = issued->product.n / 2, found = issued->flight;
    for (int i = 0; i < 2 && found < 0; i++)
        if (w->flights[i].count > 0 && w->flights[i].registers[lane] == sums) found = i;
    for (int i = 0; i < 2 && found < 0; i++)
        if (w->flights[i].count == 0) found = i;
    if (found < 0) machine_fail(at, "products of a third matrix are on their way");
    machine_flight *f = &w->flights[found];
    if (f->count == 0) {
        memset(f->registers, 0, sizeof f->registers);
        f->count = count;
    }
    if (f->count != count) machine_fail(at, "products of different widths add to one matrix");
    if (f->registers[lane] == NULL) {
        f->registers[lane] = sums;
        for (int j = 0; j < count; j++) *sum_of(f, lane, j) = sums[j];
        machine_poison(sums, count);
    } else if (f->registers[lane] != sums) machine_fail(at, "lanes add to different matrices");
    return found;
}

/* Sums that no product is on its way to come to the registers. */
static void deliver(machine_warp *w, int64_t awaited, place at)
{
    for (machine_flight &f : w->flights) {
        if (f.count == 0 || f.past > awaited) continue;
        for (int lane = 0; lane < LANES; lane++)
            for (int j = 0; j < f.count; j++) {
                float *to = &f.registers[lane][j];
                if (memcmp(to, &POISON, sizeof POISON) != 0)
                    machine_fail(at, "sums were written while products were on their way to them");
                *to = *sum_of(&f, lane, j);
            }
        f.count = 0;
    }
}

/* ---- what kernels call ---- */

static void fence(machine_warp *w, void *const *) { w->is_fenced = true; }

void machine_products_begin(place at) { machine_meet("wgmma.fence", fence, NULL, at); }

static bool is_same(const machine_product &x, const machine_product &y)
{
    return x.a == y.a && x.b == y.b && x.n == y.n && x.adds == y.adds &&
           x.b_by_columns == y.b_by_columns && x.is_bf16 == y.is_bf16 &&
           (x.a_registers == NULL) == (y.a_registers == NULL);
}

void machine_multiply(const machine_product &product, float *sums, place at)
{
    machine_lane *lane = machine_current();
    machine_warp *w = lane->warp;
    if (!w->is_fenced) machine_fail(at, "a product after a wait, without wgmma.fence");
    size_t n = (size_t)(lane->issued++ - w->first);
    if (n == w->issued.size()) {
        w->issued.push_back({product, {}, 0, -1, at});
        uint64_t shared = product.a_registers == NULL ? product.a >> 16 << 16 : 0;
        w->hash = (w->hash ^ product.b ^ shared ^ (uint64_t)product.n << 48) * 0x9e3779b97f4a7c15;
    }
    machine_issued *issued = &w->issued[n];
    if (!is_same(issued->product, product))
        machine_fail(at, "lanes of a warp differ in their products");
    issued->a[lane->index] = product.a_registers;
    issued->lanes |= 1u << lane->index;
    issued->flight = flight_of(w, issued, lane->index, sums, at);
    w->flights[issued->flight].past = w->first + (int64_t)n + 1;
}

static void commit(machine_warp *w, void *const *given)
{
    place at = *(const place *)given[0];
    for (const machine_issued &i : w->issued)
        if (i.lanes != ~0u)
            machine_fail(at, "not all lanes issued a product of %s:%d", i.at.file, i.at.line);
    w->groups.push_back(w->first + (int64_t)w->issued.size());
    if (machine_draw(2) == 0) compute_until(w, w->groups.back());
}

void machine_products_commit(place at) { machine_meet("wgmma.commit_group", commit, &at, at); }

struct product_wait {
    int pending;
    place at;
};

static void wait(machine_warp *w, void *const *given)
{
    const product_wait *wait = (const product_wait *)given[0];
    int64_t awaited = w->first;
    while (w->groups.size() > (size_t)wait->pending) {
        awaited = w->groups.front();
        w->groups.erase(w->groups.begin());
    }
    compute_until(w, awaited);
    deliver(w, awaited, wait->at);
    w->issued.erase(w->issued.begin(), w->issued.begin() + (awaited - w->first));
    w->first = awaited;
    w->is_fenced = false;
}

void machine_products_wait(int pending, place at)
{
    product_wait mine = {pending, at};
    machine_meet("wgmma.wait_group", wait, &mine, at);
}

const char *products_end(const machine_warp *warp, const machine_warp *first)
{
    if (!warp->issued.empty()) return "ended before its products";
    if (warp->hash != first->hash) return "has other products than the first of its warpgroup";
    return NULL;
}
