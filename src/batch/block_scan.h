/* block_scan.h: copies a block table and finds its largest entry in one pass, so that later checks need not read it
 * again. */
#ifndef FOLIOI_BLOCK_SCAN_H
#define FOLIOI_BLOCK_SCAN_H

#include <stdbool.h>
#include <stdint.h>

typedef struct folioi_block_scan {
    uint32_t
        end; /* largest entry + 1 as unsigned: above 2^31 where an entry is below FOLIO_NO_BLOCK */
    bool holes; /* some entry is negative */
} folioi_block_scan;

/** to may overlap table where it does not begin behind it. */
folioi_block_scan folioi_scan_blocks(int32_t *to, const int32_t *table, int64_t n);

#endif
