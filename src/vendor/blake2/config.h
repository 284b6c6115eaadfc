/* What blake2-impl.h includes: the ending of the names that blake2b-ref.c defines. Folio's; the other files are unchanged. */
#define SUFFIX _folioi
