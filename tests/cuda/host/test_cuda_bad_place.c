/* test_cuda_bad_place.c: rows of a step on a device, and the tokens that brought them, run on the host. */
#include "backends/cuda/step/bad_place.h"
#include "support.h"

enum { K = FOLIO_WRITTEN_K, V = FOLIO_WRITTEN_V, OUT = FOLIO_WRITTEN_OUT };

static void check_place(const folioi_cuda_seq *seqs, int32_t n, bool is_decoder, int what,
                        int64_t row, int64_t want_seq, int64_t want_position)
{
    folioi_cuda_counts counts = {.num_seqs = n};
    int64_t seq = -1, position = -1;
    bool found = bad_place(&counts, seqs, is_decoder, what, row, &seq, &position);
    CHECK_INT(found, want_seq >= 0);
    CHECK_MSG(seq == want_seq && position == want_position,
              "row %lld of %d: seq %lld at %lld, not %lld at %lld", (long long)row, what,
              (long long)seq, (long long)position, (long long)want_seq, (long long)want_position);
}

/* A chunk, padding, a refused sequence, a decode; then rows past the batch's. */
TEST(cuda_bad_place, rows_of_a_decoder)
{
    const folioi_cuda_seq seqs[] = {
        {.query_row = 0, .new_row = 0, .query_len = 3, .key_len = 20, .context_len = 17},
        {.query_row = 3, .new_row = 3, .query_len = 2},
        {.query_row = 5, .new_row = 5},
        {.query_row = 7, .new_row = 7, .query_len = 1, .key_len = 9, .context_len = 8}};
    for (int what = K; what <= OUT; what++) {
        for (int64_t row = 0; row < 3; row++) check_place(seqs, 4, true, what, row, 0, 17 + row);
        for (int64_t row = 3; row < 7; row++) check_place(seqs, 4, true, what, row, -1, -1);
        check_place(seqs, 4, true, what, 7, 3, 8);
        check_place(seqs, 4, true, what, 8, -1, -1);
    }
}

/* Of cross attention k and v have the encoder's rows; out has rows of the decoder, counted in their sequence. */
TEST(cuda_bad_place, rows_of_cross_attention_and_of_more_queries_than_keys)
{
    const folioi_cuda_seq cross[] = {
        {.query_row = 0, .new_row = 0, .query_len = 1, .key_len = 6, .context_len = 6},
        {.query_row = 1, .new_row = 0, .query_len = 4, .key_len = 5}};
    check_place(cross, 2, false, K, 0, 1, 0);
    check_place(cross, 2, false, V, 4, 1, 4);
    check_place(cross, 2, false, K, 5, -1, -1);
    check_place(cross, 2, false, OUT, 0, 0, 0);
    check_place(cross, 2, false, OUT, 4, 1, 3);
    const folioi_cuda_seq reads[] = {{.query_len = 12, .key_len = 9, .context_len = 9}};
    check_place(reads, 1, true, OUT, 11, 0, 11);
    check_place(reads, 1, true, K, 0, -1, -1);
}

/* Layers, then attentions, then types, then K, V, out, then rows, then heads. */
TEST(cuda_bad_place, keys_are_in_order)
{
    const uint64_t keys[] = {
        bad_key(-7, 0, 2, 0, K, 0, 0),          bad_key(0, 0, 2, 0, K, 0, 65535),
        bad_key(0, 0, 2, 0, K, 1, 0),           bad_key(0, 0, 2, 0, K, INT32_MAX, 3),
        bad_key(0, 0, 2, 0, V, 0, 0),           bad_key(0, 0, 2, 0, OUT, 0, 0),
        bad_key(0, 0, 2, 3, K, 0, 0),           bad_key(0, 1, 2, 0, K, 0, 0),
        bad_key(1, 0, 2, 0, K, 0, 0),           bad_key(4095, 0, 2, 0, K, 0, 0),
        bad_key(INT32_MAX, 0, 2, 3, OUT, 9, 7), FOLIOI_BAD_NONE};
    for (int i = 1; i < COUNT_OF(keys); i++) CHECK_MSG(keys[i - 1] < keys[i], "key %d", i);
    uint64_t last = keys[COUNT_OF(keys) - 2];
    CHECK_INT(bad_key_type(last), 3);
    CHECK_INT(bad_key_what(last), OUT);
    CHECK_INT(bad_key_row(last), 9);
    CHECK_INT(bad_key_head(last), 7);
}
