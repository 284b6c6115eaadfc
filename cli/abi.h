/*
 * abi.h: what the public headers declare, for people who bind. cmake/abi-table.sh makes the tables from the headers
 * when the program is built; each ends with a name that is NULL.
 */
#ifndef FOLIO_ABI_H
#define FOLIO_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef struct abi_field {
    const char *name, *type;
    const char *declaration; /* "int64_t dims[6]" */
    size_t offset, size;
} abi_field;

typedef struct abi_struct {
    const char *name, *header;
    size_t size, align;
    const abi_field *fields;
    int num_fields;
} abi_struct;

typedef struct abi_value {
    const char *name;
    int64_t value;
} abi_value;

typedef struct abi_enum {
    const char *name, *header;
    size_t size;
    const abi_value *values;
    int num_values;
} abi_enum;

/* A #define with a value. */
typedef struct abi_constant {
    const char *name, *header;
    const char *text; /* NULL: it is a number */
    int64_t value;
} abi_constant;

/* A struct that only the library sees inside. */
typedef struct abi_handle {
    const char *name, *header;
} abi_handle;

typedef struct abi_parameter {
    const char *name, *type;
} abi_parameter;

typedef struct abi_function {
    const char *name, *header, *returns, *prototype;
    const abi_parameter *parameters;
    int num_parameters;
} abi_function;

extern const abi_struct abi_structs[];
extern const abi_enum abi_enums[];
extern const abi_constant abi_constants[];
extern const abi_handle abi_handles[];
extern const abi_function abi_callbacks[]; /* types of functions that the caller writes */
extern const abi_function abi_functions[];

/* To stdout: all of it, as text or as one JSON object. */
void abi_print_text(void);
void abi_print_json(void);

#endif
