/*
 * test_abi.c: the tables of `folio info --abi`, which a script makes from the headers: right where this file's own
 * compiler can say so, and complete compared with the headers' text, read here in another way.
 */
#include "abi.h"
#include "support.h"

#include <ctype.h>
#include <folio/folio.h>
#include <folio/folio_pool.h>
#include <folio/folio_vllm06.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const abi_struct *find_struct(const char *name)
{
    for (const abi_struct *s = abi_structs; s->name; s++)
        if (strcmp(s->name, name) == 0) return s;
    return NULL;
}

static const abi_field *find_field(const char *owner, const char *name)
{
    const abi_struct *s = find_struct(owner);
    for (int i = 0; s && i < s->num_fields; i++)
        if (strcmp(s->fields[i].name, name) == 0) return &s->fields[i];
    return NULL;
}

static const abi_function *find_function(const char *name)
{
    for (const abi_function *f = abi_functions; f->name; f++)
        if (strcmp(f->name, name) == 0) return f;
    return NULL;
}

/* ---- What this compiler says */

#define FIELD(owner, name, type)                                                                   \
    {                                                                                              \
#owner, #name, type, offsetof(owner, name), sizeof(((owner *)0)->name), sizeof(owner)      \
    }

TEST(abi, fields_are_where_a_c_program_finds_them)
{
    static const struct {
        const char *owner, *name, *type;
        size_t offset, size, whole;
    } fields[] = {
        FIELD(folio_context_desc, struct_size, "size_t"),
        FIELD(folio_context_desc, backend, "const char *"),
        FIELD(folio_context_desc, executor, "folio_executor"),
        FIELD(folio_context_desc, pin_threads, "int32_t"),
        FIELD(folio_allocator, alloc, "void *(*)(void *user, size_t size, size_t align)"),
        FIELD(folio_attention_desc, kv_dtype, "folio_dtype"),
        FIELD(folio_attention_desc, soft_cap, "float"),
        FIELD(folio_kv_array, strides, "int64_t[6]"),
        FIELD(folio_kv_cache_shape, v_scales, "folio_kv_array"),
        FIELD(folio_kv_memory, k_scales, "float *const *"),
        FIELD(folio_tensors, out, "folio_tensor"),
        FIELD(folio_vllm06_kv_cache, value_cache, "void *"),
        FIELD(folio_vllm06_kv_cache, block_size, "int32_t"),
        FIELD(folio_vllm06_forward_args, v_scale, "float"),
    };
    for (int i = 0; i < COUNT_OF(fields); i++) {
        const abi_struct *s = find_struct(fields[i].owner);
        const abi_field *f = find_field(fields[i].owner, fields[i].name);
        CHECK_MSG(f != NULL, "%s.%s is missing", fields[i].owner, fields[i].name);
        if (f == NULL) continue;
        CHECK(f->offset == fields[i].offset && f->size == fields[i].size);
        CHECK(s->size == fields[i].whole);
        CHECK_MSG(strcmp(f->type, fields[i].type) == 0, "%s.%s: %s", s->name, f->name, f->type);
    }
}

TEST(abi, fields_follow_each_other_to_the_end)
{
    for (const abi_struct *s = abi_structs; s->name; s++) {
        size_t end = 0;
        for (int i = 0; i < s->num_fields; i++) {
            const abi_field *f = &s->fields[i];
            CHECK_MSG(f->offset >= end && f->offset - end < 8, "%s.%s", s->name, f->name);
            end = f->offset + f->size;
        }
        CHECK_MSG(s->size >= end && s->size - end < s->align, "%s", s->name);
    }
}

TEST(abi, enums_and_constants_have_their_values)
{
    int seen = 0;
    for (const abi_enum *e = abi_enums; e->name; e++)
        for (int i = 0; i < e->num_values; i++) {
            const abi_value *v = &e->values[i];
            if (strcmp(v->name, "FOLIO_ERR_FULL") == 0) seen += v->value == FOLIO_ERR_FULL;
            if (strcmp(v->name, "FOLIO_INT8") == 0) seen += v->value == FOLIO_INT8;
            if (strcmp(e->name, "folio_status") == 0)
                CHECK(strcmp(v->name, folio_status_name((folio_status)v->value)) == 0);
        }
    for (const abi_constant *c = abi_constants; c->name; c++) {
        if (strcmp(c->name, "FOLIO_NO_BLOCK") == 0) seen += c->text == NULL && c->value == -1;
        if (strcmp(c->name, "FOLIO_VERSION_STRING") == 0)
            seen += c->text && strcmp(c->text, folio_version()) == 0;
        if (strcmp(c->name, "FOLIO_VLLM06_PARTITION_SIZE") == 0) seen += c->value == 512;
    }
    CHECK(seen == 5);
}

TEST(abi, functions_have_their_parameters)
{
    const abi_function *f = find_function("folio_context_create");
    CHECK(f && f->num_parameters == 2 && strcmp(f->returns, "folio_status") == 0);
    CHECK(f && strcmp(f->parameters[0].type, "const folio_context_desc *") == 0);
    CHECK(f && strcmp(f->parameters[1].name, "out") == 0);
    CHECK(f && strcmp(f->parameters[1].type, "folio_context **") == 0);
    f = find_function("folio_version");
    CHECK(f && f->num_parameters == 0 && strcmp(f->returns, "const char *") == 0);
    f = find_function("folio_vllm06_copy_blocks");
    CHECK(f && strcmp(f->parameters[3].type, "const folio_block_pair *") == 0);
    CHECK(f && strcmp(f->header, "folio_vllm06.h") == 0);
}

/* ---- The headers' text: without comments and directives, all white space a blank */

typedef struct header_text {
    char *text;
    int constants; /* #define FOLIO_NAME value */
} header_text;

static bool is_constant(const char *line)
{
    static const char start[] = "#define FOLIO_", api[] = "#define FOLIO_API ";
    const char *at = line + strlen(start);
    if (strncmp(line, start, strlen(start)) != 0 || strncmp(line, api, strlen(api)) == 0)
        return false;
    while (isupper((unsigned char)*at) || isdigit((unsigned char)*at) || *at == '_') at++;
    return at[0] == ' ' && at[1] != ' ';
}

static header_text read_header(const char *name)
{
    char path[512];
    header_text h = {.constants = 0};
    snprintf(path, sizeof path, "%s/../include/folio/%s", FOLIO_TESTS_DIR, name);
    FILE *in = fopen(path, "r");
    CHECK_MSG(in != NULL, "%s cannot be read", path);
    h.text = calloc(1, 1 << 20);
    size_t used = in && h.text ? fread(h.text, 1, (1 << 20) - 1, in) : 0;
    if (in) fclose(in);
    char *to = h.text;
    bool start = true; /* of a line */
    for (const char *at = h.text, *end = h.text + used; at < end;) {
        if (strncmp(at, "/*", 2) == 0) {
            at = strstr(at, "*/") + 2;
        } else if (start && *at == '#') { /* with the lines that continue it */
            h.constants += is_constant(at);
            while (*at != '\n' || at[-1] == '\\') at++;
        } else {
            start = *at == '\n';
            *to++ = (char)(isspace((unsigned char)*at) ? ' ' : *at);
            at++;
        }
    }
    *to = '\0';
    return h;
}

/* The name that ends before `end`, a bracket behind it not counted. */
static void last_name(const char *from, const char *end, char *name, size_t size)
{
    const char *bracket = memchr(from, '[', (size_t)(end - from));
    if (bracket) end = bracket;
    while (end > from && !isalnum((unsigned char)end[-1]) && end[-1] != '_') end--;
    const char *start = end;
    while (start > from && (isalnum((unsigned char)start[-1]) || start[-1] == '_')) start--;
    snprintf(name, size, "%.*s", (int)(end - start), start);
}

/* The fields of one body; returns how many. */
static int check_fields(const char *owner, const char *body, const char *end)
{
    char name[64];
    int count = 0;
    for (const char *at = body; at < end;) {
        const char *stop = memchr(at, ';', (size_t)(end - at));
        if (stop == NULL) break;
        const char *pointer = strstr(at, "(*");
        bool is_function = pointer && pointer < stop;
        while (at < stop) {
            const char *comma = is_function ? NULL : memchr(at, ',', (size_t)(stop - at));
            const char *to = comma ? comma : stop;
            last_name(at, is_function ? strchr(pointer, ')') : to, name, sizeof name);
            CHECK_MSG(find_field(owner, name) != NULL, "%s.%s is missing", owner, name);
            count++;
            at = to + 1;
        }
        at = stop + 1;
    }
    return count;
}

TEST(abi, every_declaration_of_the_headers_is_there)
{
    static const char *const headers[] = {"folio.h", "folio_pool.h", "folio_vllm06.h"};
    int constants = 0, structs = 0, functions = 0;
    for (int i = 0; i < COUNT_OF(headers); i++) {
        header_text h = read_header(headers[i]);
        constants += h.constants;
        for (const char *at = h.text; (at = strstr(at, "typedef struct ")) != NULL;) {
            const char *body = at + strcspn(at, "{;"), *end = strchr(body, '}');
            at = body;
            if (*body == ';') continue; /* a handle */
            char name[64];
            last_name(end, strchr(end, ';'), name, sizeof name);
            const abi_struct *s = find_struct(name);
            CHECK_MSG(s != NULL, "%s is missing", name);
            int fields = check_fields(name, body + 1, end);
            CHECK_MSG(s == NULL || s->num_fields == fields, "%s has %d fields", name, fields);
            CHECK(s == NULL || strcmp(s->header, headers[i]) == 0);
            structs++;
        }
        for (const char *at = h.text; (at = strstr(at, "FOLIO_API ")) != NULL; at++) {
            char name[64];
            last_name(at, strchr(at, '('), name, sizeof name);
            CHECK_MSG(find_function(name) != NULL, "%s is missing", name);
            functions++;
        }
        free(h.text);
    }
    int in_table[3] = {0};
    for (const abi_struct *s = abi_structs; s->name; s++) in_table[0]++;
    for (const abi_function *f = abi_functions; f->name; f++) in_table[1]++;
    for (const abi_constant *c = abi_constants; c->name; c++) in_table[2]++;
    CHECK_MSG(structs == in_table[0] && structs > 40, "%d structs, %d in the table", structs,
              in_table[0]);
    CHECK_MSG(functions == in_table[1] && functions > 80, "%d functions, %d in the table",
              functions, in_table[1]);
    CHECK_MSG(constants == in_table[2] && constants > 10, "%d constants, %d in the table",
              constants, in_table[2]);
}
