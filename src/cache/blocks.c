/* blocks.c: allocates the arrays of a tier's blocks. */
#include "cache/blocks.h"

folio_status folioi_blocks_init(const folio_allocator *a, folioi_blocks *b, int64_t num,
                                const char *what)
{
    void *memory;
    *b = (folioi_blocks){.oldest = NONE, .newest = NONE};
    TRY(folioi_alloc(a, num * (int64_t)sizeof(folioi_block), what, &memory));
    b->block = memory;
    b->num = num; /* from here on there are blocks to look at */
    folio_status status = folioi_alloc(a, num * (int64_t)sizeof(int32_t), what, &memory);
    if (status != FOLIO_OK) {
        folioi_blocks_free(a, b);
        return status;
    }
    b->free_stack = memory;
    b->num_free = b->num_clean = num;
    for (int64_t i = 0; i < num; i++) {
        b->block[i] = (folioi_block){.node = NONE, .group = NONE, .copy = NONE};
        b->block[i].prev = b->block[i].next = NONE;
        b->free_stack[i] = (int32_t)(num - 1 - i); /* so that block 0 comes first */
    }
    return FOLIO_OK;
}

void folioi_blocks_free(const folio_allocator *a, folioi_blocks *b)
{
    folioi_free(a, b->block, b->num * (int64_t)sizeof(folioi_block));
    folioi_free(a, b->free_stack, b->num * (int64_t)sizeof(int32_t));
    *b = (folioi_blocks){.oldest = NONE, .newest = NONE};
}
