/* test_cuda_interface.c: the list of what libfolio and libfolio_cuda exchange leaves no field out. */
#include "backends/cuda_library.h"
#include "test.h"

typedef struct {
    const char *type, *field; /* field NULL: the struct itself */
    size_t offset, size, align;
} row;

static const row rows[] = {
#define STRUCT(type) {#type, NULL, 0, sizeof(type), _Alignof(type)},
#define FIELD(type, field)                                                                         \
    {#type, #field, offsetof(type, field), sizeof(((type *)0)->field),                             \
     _Alignof(__typeof__(((type *)0)->field))},
#include "backends/cuda_interface.def"
#undef STRUCT
#undef FIELD
};

static size_t align_up(size_t n, size_t align) { return (n + align - 1) / align * align; }

/* Every field begins where the one before it ends, but for its own alignment; nothing comes after the last. */
TEST(cuda_interface, lists_every_field)
{
    size_t n = sizeof rows / sizeof rows[0], end = 0;
    const row *type = NULL;
    for (size_t i = 0; i <= n; i++) {
        const row *r = i < n ? &rows[i] : NULL;
        if (r != NULL && r->field != NULL) {
            CHECK_MSG(r->offset == align_up(end, r->align),
                      "cuda_interface.def: a field before %s.%s is missing", r->type, r->field);
            end = r->offset + r->size;
            continue;
        }
        CHECK_MSG(type == NULL || end == 0 || type->size == align_up(end, type->align),
                  "cuda_interface.def: the last field of %s is missing", type->type);
        type = r;
        end = 0;
    }
}
