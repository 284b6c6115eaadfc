/* dtype.c: names and sizes of the enums in the header. */
#include "core/dtype.h"

typedef struct {
    const char *name;
    size_t size;
} dtype_row;

static const dtype_row dtypes[] = {
    [0] = {"unknown", 0},
    [FOLIO_F32] = {"f32", 4},
    [FOLIO_F16] = {"f16", 2},
    [FOLIO_BF16] = {"bf16", 2},
    [FOLIO_FP8_E4M3] = {"fp8_e4m3", 1},
    [FOLIO_FP8_E5M2] = {"fp8_e5m2", 1},
    [FOLIO_INT8] = {"int8", 1},
    [FOLIO_F64] = {"f64", 8},
};

static const char *const type_names[] = {"decoder", "encoder", "encoder_only", "encoder_decoder"};

static const char *const layout_names[] = {
    "native",          "nhd",     "hnd",       "interleaved_nhd",
    "interleaved_hnd", "xpacked", "xpacked_1", "strided"};

static const dtype_row *row_of(folio_dtype dtype)
{
    unsigned i = (unsigned)dtype;
    return &dtypes[i < sizeof dtypes / sizeof dtypes[0] ? i : 0];
}

size_t folio_dtype_size(folio_dtype dtype) { return row_of(dtype)->size; }

size_t folio_dtype_numbers(folio_dtype dtype) { return row_of(dtype) != dtypes; }

const char *folio_dtype_name(folio_dtype dtype) { return row_of(dtype)->name; }

const char *folio_attention_type_name(folio_attention_type type)
{
    unsigned i = (unsigned)type;
    return i < FOLIO_NUM_ATTENTION_TYPES ? type_names[i] : "unknown";
}

const char *folio_layout_name(folio_layout layout)
{
    unsigned i = (unsigned)layout;
    return i < FOLIO_NUM_LAYOUTS ? layout_names[i] : "unknown";
}
