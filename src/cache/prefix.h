/* prefix.h: sequences and the prefix index. Under the pool's lock. */
#ifndef FOLIOI_PREFIX_H
#define FOLIOI_PREFIX_H

#include "cache/transfer.h"

/** folio_sequence_match; *transfer is what brings blocks back, or NULL. */
folio_status folioi_prefix_match(folio_sequence *s, const folio_tokens *tokens,
                                 folio_transfer **transfer);

/** After a transfer in: what came back enters the index; a block that did not come ends the sequence before it. */
void folioi_prefix_arrive(folio_transfer *t);

#endif
