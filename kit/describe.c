/* describe.c: a case in words, for the line that says it failed. */
#include "kit/kit.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct line {
    char *text;
    size_t size, length;
} line;

static void say(line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(line *l, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(l->text + l->length, l->size - l->length, format, args);
    va_end(args);
    if (n > 0) l->length += (size_t)n < l->size - l->length ? (size_t)n : l->size - l->length - 1;
}

static void say_options(line *l, const kit_spec *s)
{
    const struct {
        const char *name;
        bool on;
    } flags[] = {{"alibi", s->alibi},
                 {"sinks", s->sinks},
                 {"head scales", s->head_scales},
                 {"append", s->append},
                 {"no cache", s->no_cache},
                 {"no write", s->no_write},
                 {"graph", s->graph},
                 {"batch invariant", s->batch_invariant},
                 {"private slots", s->private_slots},
                 {"only decodes", s->only_decodes},
                 {"no lse", s->no_lse},
                 {"hidden NaN", s->hidden_nan},
                 {"strided", s->strided},
                 {"wide gaps", s->wide_gaps},
                 {"in place", s->in_place}};
    if (s->soft_cap > 0) say(l, ", soft cap %g", (double)s->soft_cap);
    if (s->windowed)
        say(l, ", window %lld|%lld", (long long)s->window_left, (long long)s->window_right);
    if (s->bias || s->bias_shared) {
        folio_dtype dtype = s->bias_dtype ? s->bias_dtype : FOLIO_F32;
        say(l, ", %s bias 0x%x", folio_dtype_name(dtype), s->bias);
    }
    if (s->bias_hidden > 0) say(l, " (%g hidden)", s->bias_hidden);
    if (s->amplitude > 0) say(l, ", q * %g", s->amplitude);
    if (s->nan_from > 0) say(l, ", NaN from token %lld on", (long long)s->nan_from);
    if (s->nan_before > 0) say(l, ", NaN before token %lld", (long long)s->nan_before);
    if (s->rotary)
        say(l, ", rotary %s [%d, %d)%s", s->rotary_pairing ? "pairs" : "halves",
            (int)s->rotary_first, (int)(s->rotary_first + s->rotary),
            s->positions ? " at given positions" : "");
    if (s->offset > 0) say(l, ", %lld past alignment", (long long)s->offset);
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (flags[i].on) say(l, ", %s", flags[i].name);
}

void kit_describe(const kit_spec *s, folio_attention_type type, const kit_seq *seqs,
                  int64_t num_seqs, char *text, size_t size)
{
    line l = {text, size, 0};
    folio_dtype dtype = s->dtype ? s->dtype : FOLIO_F32;
    int32_t heads = s->num_heads ? s->num_heads : 4, k_size = s->k_head_size ? s->k_head_size : 32;
    if (size == 0) return;
    say(&l, "%s, %s over %s, heads %d/%d of %d", folio_attention_type_name(type),
        folio_dtype_name(dtype), folio_dtype_name(s->kv_dtype ? s->kv_dtype : dtype), (int)heads,
        (int)(s->num_kv_heads ? s->num_kv_heads : heads), (int)k_size);
    if (s->v_head_size && s->v_head_size != k_size) say(&l, " and %d", (int)s->v_head_size);
    if (s->v_in_k) say(&l, " (V in K)");
    if (s->k_dtype || s->v_dtype) {
        folio_dtype k = s->k_dtype ? s->k_dtype : dtype;
        say(&l, ", k %s and v %s", folio_dtype_name(k),
            folio_dtype_name(s->v_dtype ? s->v_dtype : k));
    }
    say(&l, ", %s blocks of %d", folio_layout_name(s->layout),
        (int)(s->block_size ? s->block_size : 16));
    say_options(&l, s);
    say(&l, "; query/seq");
    for (int64_t i = 0; i < num_seqs; i++) {
        say(&l, " %lld/%lld", (long long)seqs[i].query_len, (long long)seqs[i].seq_len);
        if (seqs[i].encoder_len)
            say(&l, "+%lld/%lld", (long long)seqs[i].encoder_new_len,
                (long long)seqs[i].encoder_len);
    }
}
