/* figures.h: numbers as people read them. Each returns its text. */
#ifndef FOLIO_FIGURES_H
#define FOLIO_FIGURES_H

#include <stddef.h>

/* "12,031", "1,234.5" with one digit behind the point. */
const char *figure_grouped(char *text, size_t size, double value, int digits);
/* Three digits and a unit: "456 us", "12.3 ms", "4.56 s", "17.2 min". */
const char *figure_time(char *text, size_t size, double ms);

#endif
