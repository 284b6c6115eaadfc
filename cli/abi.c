/* abi.c: `folio info --abi`: see abi.h. */
#include "abi.h"

#include "base/json.h"

#include <folio/folio.h>
#include <stdio.h>

/* ---- Text */

static void print_structs(void)
{
    for (const abi_struct *s = abi_structs; s->name; s++) {
        printf("\nstruct %s: %zu bytes, aligned to %zu (%s)\n", s->name, s->size, s->align,
               s->header);
        printf("  offset  size\n");
        for (int i = 0; i < s->num_fields; i++) {
            const abi_field *f = &s->fields[i];
            printf("  %6zu %5zu  %s\n", f->offset, f->size, f->declaration);
        }
    }
}

static void print_functions(const char *what, const abi_function *functions)
{
    printf("\n%s\n", what);
    for (const abi_function *f = functions; f->name; f++)
        printf("  %s (%s)\n", f->prototype, f->header);
}

void abi_print_text(void)
{
    printf("folio %s: what the headers declare, as compiled here. Pointers have %zu bytes.\n",
           folio_version(), sizeof(void *));
    print_structs();
    for (const abi_enum *e = abi_enums; e->name; e++) {
        printf("\nenum %s: %zu bytes (%s)\n", e->name, e->size, e->header);
        for (int i = 0; i < e->num_values; i++)
            printf("  %6lld  %s\n", (long long)e->values[i].value, e->values[i].name);
    }
    printf("\nconstants\n");
    for (const abi_constant *c = abi_constants; c->name; c++)
        if (c->text) printf("  %s = \"%s\" (%s)\n", c->name, c->text, c->header);
        else printf("  %s = %lld (%s)\n", c->name, (long long)c->value, c->header);
    printf("\nhandles: structs that only the library sees inside\n");
    for (const abi_handle *h = abi_handles; h->name; h++) printf("  %s (%s)\n", h->name, h->header);
    print_functions("types of functions that the caller writes", abi_callbacks);
    print_functions("functions", abi_functions);
}

/* ---- JSON */

static void write_structs(json *j)
{
    json_array(j, "structs");
    for (const abi_struct *s = abi_structs; s->name; s++) {
        json_object(j, NULL);
        json_string(j, "name", s->name);
        json_string(j, "header", s->header);
        json_integer(j, "size", (int64_t)s->size);
        json_integer(j, "align", (int64_t)s->align);
        json_array(j, "fields");
        for (int i = 0; i < s->num_fields; i++) {
            const abi_field *f = &s->fields[i];
            json_object(j, NULL);
            json_string(j, "name", f->name);
            json_string(j, "type", f->type);
            json_integer(j, "offset", (int64_t)f->offset);
            json_integer(j, "size", (int64_t)f->size);
            json_close(j);
        }
        json_close(j);
        json_close(j);
    }
    json_close(j);
}

static void write_enums(json *j)
{
    json_array(j, "enums");
    for (const abi_enum *e = abi_enums; e->name; e++) {
        json_object(j, NULL);
        json_string(j, "name", e->name);
        json_string(j, "header", e->header);
        json_integer(j, "size", (int64_t)e->size);
        json_array(j, "values");
        for (int i = 0; i < e->num_values; i++) {
            json_object(j, NULL);
            json_string(j, "name", e->values[i].name);
            json_integer(j, "value", e->values[i].value);
            json_close(j);
        }
        json_close(j);
        json_close(j);
    }
    json_close(j);
}

static void write_names(json *j)
{
    json_array(j, "constants");
    for (const abi_constant *c = abi_constants; c->name; c++) {
        json_object(j, NULL);
        json_string(j, "name", c->name);
        json_string(j, "header", c->header);
        if (c->text) json_string(j, "value", c->text);
        else json_integer(j, "value", c->value);
        json_close(j);
    }
    json_close(j);
    json_array(j, "handles");
    for (const abi_handle *h = abi_handles; h->name; h++) {
        json_object(j, NULL);
        json_string(j, "name", h->name);
        json_string(j, "header", h->header);
        json_close(j);
    }
    json_close(j);
}

static void write_functions(json *j, const char *key, const abi_function *functions)
{
    json_array(j, key);
    for (const abi_function *f = functions; f->name; f++) {
        json_object(j, NULL);
        json_string(j, "name", f->name);
        json_string(j, "header", f->header);
        json_string(j, "returns", f->returns);
        json_array(j, "parameters");
        for (int i = 0; i < f->num_parameters; i++) {
            json_object(j, NULL);
            json_string(j, "name", f->parameters[i].name);
            json_string(j, "type", f->parameters[i].type);
            json_close(j);
        }
        json_close(j);
        json_close(j);
    }
    json_close(j);
}

void abi_print_json(void)
{
    json j = {.out = stdout};
    json_object(&j, NULL);
    json_string(&j, "version", folio_version());
    json_integer(&j, "pointer_size", (int64_t)sizeof(void *));
    write_structs(&j);
    write_enums(&j);
    write_names(&j);
    write_functions(&j, "callbacks", abi_callbacks);
    write_functions(&j, "functions", abi_functions);
    json_close(&j);
}
