/* table.h: a table, as Markdown with each column as wide as its widest cell. */
#ifndef FOLIO_TABLE_H
#define FOLIO_TABLE_H

#include <stdint.h>

enum { TABLE_MAX_COLUMNS = 16 };

/* All zeros: an empty one. */
typedef struct table {
    char align[TABLE_MAX_COLUMNS]; /* 'l' or 'r' */
    int columns;
    char **cells; /* [num_cells], the heads first, then row by row */
    int64_t num_cells, capacity;
} table;

/* One more column; all of them come before the first cell. */
void table_head(table *t, char align, const char *name);

/* The next cell, of the next row behind the last column. */
void table_cell(table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* To stdout; the table is empty again. */
void table_print(table *t);

#endif
