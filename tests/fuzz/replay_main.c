/*
 * replay_main.c: main of the fuzz targets where libFuzzer is not: runs inputs, each a file, or many in one pack.
 *
 *     fuzz_<what> file|pack|folder...       runs them
 *     fuzz_<what> --unpack pack folder      makes a file of each input
 *     fuzz_<what> --pack folder pack        the reverse, sorted by size
 *
 * A pack is "folio-fuzz\n", then each input behind its length, 4 bytes, little-endian.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char MAGIC[] = "folio-fuzz\n";
enum { MAGIC_BYTES = sizeof MAGIC - 1, MAX_INPUTS = 1 << 16 };

typedef struct bytes {
    uint8_t *data;
    size_t size;
} bytes;

static int give_up(const char *what, const char *path)
{
    fprintf(stderr, "%s %s\n", what, path);
    exit(2);
}

static bytes read_all(const char *path)
{
    FILE *file = fopen(path, "rb");
    bytes b = {NULL, 0};
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) give_up("cannot read", path);
    b.size = (size_t)ftell(file);
    rewind(file);
    b.data = malloc(b.size + 1);
    if (b.data == NULL || fread(b.data, 1, b.size, file) != b.size) give_up("cannot read", path);
    fclose(file);
    return b;
}

static void write_all(const char *path, const uint8_t *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, size, file) != size || fclose(file) != 0)
        give_up("cannot write", path);
}

/* Memory of just this input, so that a sanitizer sees where it ends. */
static void run_one(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size > 0 ? size : 1);
    if (copy == NULL) give_up("no memory for", "an input");
    if (size > 0) memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

/* Each input of a file is run, or written to a folder. Returns how many there are. */
static int64_t each_input(const char *path, const char *folder)
{
    bytes b = read_all(path);
    int64_t count = 0;
    size_t at = MAGIC_BYTES;
    if (b.size < at || memcmp(b.data, MAGIC, at) != 0) {
        if (folder == NULL) run_one(b.data, b.size);
        free(b.data);
        return 1;
    }
    while (at + 4 <= b.size) {
        size_t size = (size_t)b.data[at] | (size_t)b.data[at + 1] << 8 |
                      (size_t)b.data[at + 2] << 16 | (size_t)b.data[at + 3] << 24;
        at += 4;
        if (size > b.size - at) give_up("cut short:", path);
        char name[4096];
        if (folder != NULL) {
            snprintf(name, sizeof name, "%s/%05lld", folder, (long long)count);
            write_all(name, b.data + at, size);
        } else run_one(b.data + at, size);
        at += size;
        count++;
    }
    free(b.data);
    return count;
}

static int by_size(const void *a, const void *b)
{
    const bytes *x = a, *y = b;
    if (x->size != y->size) return x->size < y->size ? -1 : 1;
    return x->size == 0 ? 0 : memcmp(x->data, y->data, x->size);
}

/* The files of a folder: run, or gathered in inputs. */
static int64_t each_file(const char *folder, bytes *inputs)
{
    DIR *dir = opendir(folder);
    int64_t count = 0;
    if (dir == NULL) give_up("cannot open", folder);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        char path[4096];
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || count == MAX_INPUTS) continue;
        if (inputs != NULL) inputs[count++] = read_all(path);
        else count += each_input(path, NULL);
    }
    closedir(dir);
    return count;
}

static void pack(const char *folder, const char *path)
{
    bytes *inputs = calloc(MAX_INPUTS, sizeof *inputs);
    FILE *file = fopen(path, "wb");
    if (inputs == NULL || file == NULL) give_up("cannot write", path);
    int64_t count = each_file(folder, inputs);
    qsort(inputs, (size_t)count, sizeof *inputs, by_size);
    fwrite(MAGIC, 1, MAGIC_BYTES, file);
    for (int64_t i = 0; i < count; i++) {
        size_t n = inputs[i].size;
        uint8_t head[4] = {(uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
        fwrite(head, 1, 4, file);
        fwrite(inputs[i].data, 1, n, file);
        free(inputs[i].data);
    }
    if (fclose(file) != 0) give_up("cannot write", path);
    free(inputs);
    printf("%lld inputs\n", (long long)count);
}

int main(int argc, char **argv)
{
    int64_t count = 0;
    struct stat st;
    if (argc == 4 && strcmp(argv[1], "--pack") == 0) {
        pack(argv[2], argv[3]);
        return 0;
    }
    if (argc == 4 && strcmp(argv[1], "--unpack") == 0) {
        printf("%lld inputs\n", (long long)each_input(argv[2], argv[3]));
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        if (stat(argv[i], &st) != 0) give_up("cannot find", argv[i]);
        count += S_ISDIR(st.st_mode) ? each_file(argv[i], NULL) : each_input(argv[i], NULL);
    }
    printf("%lld inputs\n", (long long)count);
    return count > 0 ? 0 : 1;
}
