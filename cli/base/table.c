/* table.c: see table.h. */
#include "base/table.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add(table *t, const char *text)
{
    if (t->num_cells == t->capacity) {
        t->capacity = t->capacity > 0 ? 2 * t->capacity : 64;
        t->cells = realloc(t->cells, (size_t)t->capacity * sizeof *t->cells);
        if (t->cells == NULL) abort();
    }
    char *copy = malloc(2 * strlen(text) + 1), *to = copy;
    if (copy == NULL) abort();
    for (; *text; *to++ = *text++)
        if (*text == '|') *to++ = '\\'; /* in Markdown it would end the cell */
    *to = '\0';
    t->cells[t->num_cells++] = copy;
}

void table_head(table *t, char align, const char *name)
{
    if (t->columns == TABLE_MAX_COLUMNS) abort();
    t->align[t->columns++] = align;
    add(t, name);
}

void table_cell(table *t, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    add(t, text);
}

static void print_rule(const table *t, const int *widths)
{
    for (int c = 0; c < t->columns; c++) {
        printf("|%s", t->align[c] == 'l' ? ":" : "");
        for (int i = 0; i < widths[c] + 1; i++) putchar('-');
        if (t->align[c] != 'l') putchar(':');
    }
    printf("|\n");
}

void table_print(table *t)
{
    int widths[TABLE_MAX_COLUMNS] = {0};
    for (int64_t i = 0; i < t->num_cells; i++) {
        int *width = &widths[i % t->columns], length = (int)strlen(t->cells[i]);
        if (length > *width) *width = length;
    }
    for (int64_t i = 0; i < t->num_cells; i++) {
        int c = (int)(i % t->columns);
        printf("| %*s ", t->align[c] == 'l' ? -widths[c] : widths[c], t->cells[i]);
        if (c == t->columns - 1) printf("|\n");
        if (i == t->columns - 1) print_rule(t, widths);
    }
    for (int64_t i = 0; i < t->num_cells; i++) free(t->cells[i]);
    free(t->cells);
    *t = (table){.columns = 0};
}
