/*
 * store.c: which frame holds what, in memory: blocks.h has the frames' states, key_table.h finds them by
 * (key, group, kind). A reference to a frame is somebody's who reads, writes or wipes it, or the table's to
 * one of a sequence: nobody else takes it. Without one it is cached while it is in the table, else free.
 * Files are read and written without the lock.
 */
#include "cache/store.h"

#include "cache/key_table.h"
#include "core/cancel.h"
#include "core/checked.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define MAX_FRAMES ((int64_t)1 << 30)

typedef struct frame_entry {
    folioi_frame_info info; /* of what is in the table, or being written */
    int32_t next;           /* in its bucket */
    int64_t bytes;          /* of the frame that may hold something: none past them */
} frame_entry;

struct folioi_store {
    folio_allocator allocator;
    folioi_store_file file;
    pthread_mutex_t forgetting; /* one forget at a time; taken before lock */
    pthread_mutex_t trimming;   /* one wipe of the tail at a time; guards tail */
    int64_t tail;         /* bytes of the file behind its last frame that may hold something */
    pthread_mutex_t lock; /* guards everything below, and file.epoch */
    pthread_cond_t wiped; /* a frame that was being wiped is free again */
    int64_t wiping;       /* frames that are held to be wiped, those in `forgotten` too */
    folioi_blocks
        frames; /* frame i is the file's frame i + 1; its node is i while it is in the table */
    int32_t forgotten;    /* the first frame of forgotten salts, all held, by their `next`; NONE */
    frame_entry *entries; /* [frames.num] */
    folioi_key_table table;
    int64_t promised; /* of the free and cached ones, to SEQUENCE puts to come */
    uint64_t stamp;   /* of the last put */
    folioi_replaced_fn replaced;
    void *replaced_user;
    folioi_store_stats stats;
};

/* ---------------------------------------------------------------------------------------- frames */

/* Under the file's random number: who knows hash_key can make keys, but not a chain of them here. */
uint64_t folioi_store_hash(const folioi_store *store, folioi_key key, int32_t group,
                           folioi_frame_kind kind)
{
    uint64_t seed = store->file.secret.word[0] ^ ((uint64_t)(uint32_t)group * 2 + (uint64_t)kind);
    return XXH3_64bits_withSeed(&key, sizeof key, seed);
}

static int32_t find(const folioi_store *store, folioi_key key, int32_t group,
                    folioi_frame_kind kind)
{
    int32_t i = *table_bucket(&store->table, folioi_store_hash(store, key, group, kind));
    for (; i != NONE; i = store->entries[i].next) {
        const folioi_frame_info *info = &store->entries[i].info;
        if (key_equal(info->key, key) && info->group == group && info->kind == kind) break;
    }
    return i;
}

static bool is_known(const folioi_store *store, int64_t i)
{
    return store->frames.block[i].node != NONE;
}

/* The caller's frame enters the table. */
static void enter(folioi_store *store, int32_t i)
{
    const folioi_frame_info *info = &store->entries[i].info;
    table_add(&store->table, folioi_store_hash(store, info->key, info->group, info->kind), i);
    store->frames.block[i].node = i;
    if (info->kind == FOLIOI_FRAME_SEQUENCE) blocks_retain(&store->frames, i);
    store->stats.used++;
}

static void leave(folioi_store *store, int32_t i)
{
    const folioi_frame_info *info = &store->entries[i].info;
    table_remove(&store->table, folioi_store_hash(store, info->key, info->group, info->kind), i);
    blocks_forget(&store->frames, i);
    if (info->kind == FOLIOI_FRAME_SEQUENCE) blocks_release(&store->frames, i);
    store->stats.used--;
}

/* As an id without ids. */
static folioi_frame_id id_of(const folioi_frame_info *info)
{
    return (folioi_frame_id){.key = info->key,
                             .parent = info->parent,
                             .digest = info->digest,
                             .salt = info->salt,
                             .group = info->group,
                             .kind = info->kind,
                             .ids_bytes = info->ids_bytes,
                             .hashed = info->hashed};
}

/* Until one of the `wiping` frames is free again. */
static void await_wiped(folioi_store *store)
{
    int cancel = cancel_defer();
    pthread_cond_wait(&store->wiped, &store->lock);
    cancel_allow(cancel);
}

/* A frame to write to, the caller's and in no table; NONE when there is none. *gone: what it held. */
static int32_t take_frame(folioi_store *store, bool *replaced, folioi_frame_id *gone)
{
    folioi_blocks *frames = &store->frames;
    while (blocks_available(frames) == 0 && store->wiping > 0) await_wiped(store);
    *replaced = frames->num_free == 0 && frames->num_cached > 0;
    if (blocks_available(frames) == 0) return NONE;
    if (*replaced) {
        *gone = id_of(&store->entries[frames->oldest].info);
        leave(store, frames->oldest);
        store->stats.evictions++;
    }
    return blocks_take(frames, NONE);
}

/* The same block: all that an id says, and the payload's length. */
static bool same_block(const folioi_frame_info *a, const folioi_frame_info *b)
{
    return key_equal(a->key, b->key) && key_equal(a->parent, b->parent) &&
           key_equal(a->digest, b->digest) && a->salt == b->salt && a->ids_hash == b->ids_hash &&
           a->payload_bytes == b->payload_bytes && a->group == b->group &&
           a->ids_bytes == b->ids_bytes && a->kind == b->kind && a->hashed == b->hashed;
}

/* The end of a frame that is the caller's and has left the table: an open would find CACHED ones. */
static void discard(folioi_store *store, int32_t i)
{
    bool wiped = store->entries[i].info.kind != FOLIOI_FRAME_CACHED ||
                 folioi_store_file_wipe(&store->file, i + 1);
    pthread_mutex_lock(&store->lock);
    if (!wiped) store->stats.errors++;
    blocks_release(&store->frames, i);
    pthread_mutex_unlock(&store->lock);
}

/* A frame that was taken to be wiped is given back. */
static void end_wipe(folioi_store *store)
{
    store->wiping--;
    pthread_cond_broadcast(&store->wiped);
}

/* An open after a kill finds what has a head: so all heads go before anything else does. */
static void wipe_forgotten(folioi_store *store)
{
    pthread_mutex_lock(&store->lock);
    while (store->forgotten != NONE) {
        int32_t first = store->forgotten;
        store->forgotten = store->frames.block[first].next;
        pthread_mutex_unlock(&store->lock);
        discard(store, first);
        pthread_mutex_lock(&store->lock);
        end_wipe(store);
    }
    pthread_mutex_unlock(&store->lock);
}

/* ------------------------------------------------------------------------------- open and close */

/* The first n frames of *list by their stamps, the oldest first; *list then begins behind them. While a
 * frame is held, `next` is free for it. */
static int32_t sort_by_stamp(folioi_store *store, int32_t *list, int64_t n)
{
    folioi_block *frames = store->frames.block;
    int32_t head = *list, *at = &head;
    if (n == 1) {
        *list = frames[head].next;
        frames[head].next = NONE;
        return head;
    }
    int32_t a = sort_by_stamp(store, list, n / 2);
    int32_t b = sort_by_stamp(store, list, n - n / 2);
    while (a != NONE && b != NONE) {
        bool a_first = store->entries[a].info.stamp < store->entries[b].info.stamp;
        int32_t *older = a_first ? &a : &b;
        *at = *older;
        at = &frames[*at].next;
        *older = *at;
    }
    *at = a != NONE ? a : b;
    return head;
}

/* Frame i, which is the scan's, enters the table if it holds a whole CACHED block. head: room for one. */
static void scan_frame(folioi_store *store, int32_t i, char *head)
{
    folioi_store_file *file = &store->file;
    folioi_frame_info info;
    folioi_seal seal;
    int64_t at = frame_offset(file, i + 1);
    store->entries[i].bytes = min_i64(file->frame_bytes, file->size - at);
    int64_t got = folioi_store_file_read(file, head, file->head_bytes, at);
    if (got < 0) store->stats.errors++;
    if (got < 0) return;
    memset(head + got, 0, (size_t)(file->head_bytes - got));
    folioi_head_state state = folioi_head_decode(file, i + 1, head, &info, &seal);
    if (state == FOLIOI_HEAD_EMPTY) return;
    if (state == FOLIOI_HEAD_TORN || at + file->head_bytes + info.payload_bytes > file->size) {
        store->stats.warnings++;
        return;
    }
    if (info.stamp > store->stamp) store->stamp = info.stamp;
    if (info.kind != FOLIOI_FRAME_CACHED || info.epoch != file->epoch) return;
    int32_t other = find(store, info.key, info.group, info.kind);
    store->entries[i].info = info;
    if (other != NONE) { /* killed before the older one was wiped */
        int32_t older = store->entries[other].info.stamp < info.stamp ? other : i;
        if (!folioi_store_file_wipe(file, older + 1)) store->stats.errors++;
        if (older == i) return;
        leave(store, other);
    }
    enter(store, i);
}

/* Give the frames of a scan back: those in the table by their stamps; then the file's first free one comes
 * first. */
static void end_scan(folioi_store *store, int64_t n)
{
    folioi_blocks *frames = &store->frames;
    int32_t list = NONE;
    for (int64_t i = n - 1; i >= 0; i--) {
        if (is_known(store, i)) frames->block[i].next = list, list = (int32_t)i;
        else blocks_release(frames, (int32_t)i);
    }
    if (list != NONE) list = sort_by_stamp(store, &list, store->stats.used);
    while (list != NONE) {
        int32_t i = list;
        list = frames->block[i].next;
        blocks_release(frames, i);
    }
}

static folio_status scan(folioi_store *store)
{
    void *head;
    const folioi_store_file *file = &store->file;
    TRY(folioi_alloc(&store->allocator, file->head_bytes, "a frame's head", &head));
    int64_t n = min_i64(ceil_div(file->size, file->frame_bytes) - 1, store->frames.num);
    for (int64_t i = 0; i < n; i++) scan_frame(store, blocks_take(&store->frames, NONE), head);
    folioi_free(&store->allocator, head, file->head_bytes);
    end_scan(store, n);
    store->tail = max_i64(0, file->size - frame_offset(file, store->frames.num + 1));
    if (file->epoch_lost) store->stats.warnings++;
    return FOLIO_OK;
}

/* A power of two. */
static int64_t num_buckets(int64_t num_frames)
{
    int64_t n = 1;
    while (n < num_frames) n *= 2;
    return n;
}

static folio_status make_index(folioi_store *store, int64_t max_bytes)
{
    int64_t n = min_i64(max_bytes / store->file.frame_bytes - 1, MAX_FRAMES);
    const folio_allocator *a = &store->allocator;
    void *memory;
    TRY(folioi_blocks_init(a, &store->frames, n, "the store's frames"));
    store->stats.num_frames = n;
    TRY(folioi_alloc(a, n * (int64_t)sizeof(frame_entry), "the store's index", &memory));
    store->entries = memory;
    TRY(folioi_alloc(a, num_buckets(n) * (int64_t)sizeof(int32_t), "the store's index", &memory));
    table_init(&store->table, memory, num_buckets(n));
    store->table.chain = (char *)&store->entries[0].next;
    store->table.stride = sizeof(frame_entry);
    return scan(store);
}

folio_status folioi_store_open(const folio_allocator *a, const folioi_store_desc *desc,
                               folioi_store **out)
{
    void *memory;
    *out = NULL;
    TRY(folioi_alloc(a, sizeof(folioi_store), "the store", &memory));
    folioi_store *store = memory;
    store->allocator = *a;
    folio_status status = folioi_store_file_open(&store->file, desc);
    if (status != FOLIO_OK) {
        folioi_free(a, store, sizeof *store);
        return status;
    }
    store->forgotten = NONE;
    pthread_mutex_init(&store->forgetting, NULL);
    pthread_mutex_init(&store->trimming, NULL);
    pthread_cond_init(&store->wiped, NULL);
    pthread_mutex_init(&store->lock, NULL);
    status = make_index(store, desc->max_bytes);
    if (status == FOLIO_OK) {
        *out = store;
        return FOLIO_OK;
    }
    if (store->file.made && desc->ops == NULL) unlink(desc->path); /* as if nothing had been */
    folioi_store_close(store);
    return status;
}

void folioi_store_close(folioi_store *store)
{
    if (store == NULL) return;
    /* A forget that could not be written: the last chance. */
    if (!store->file.epoch_saved)
        (void)folioi_store_file_save_epoch(&store->file, store->file.epoch);
    folioi_store_file_close(&store->file);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->wiped);
    pthread_mutex_destroy(&store->trimming);
    pthread_mutex_destroy(&store->forgetting);
    folio_allocator a = store->allocator;
    int64_t n = store->frames.num;
    folioi_free(&a, store->table.buckets, num_buckets(n) * (int64_t)sizeof(int32_t));
    folioi_free(&a, store->entries, n * (int64_t)sizeof(frame_entry));
    folioi_blocks_free(&a, &store->frames);
    folioi_free(&a, store, sizeof *store);
}

/* ------------------------------------------------------------------------------------------ put */

static folio_status check_put(const folioi_store *store, const folioi_frame_id *id, int64_t bytes)
{
    const folioi_store_file *file = &store->file;
    REQUIRE(id->kind == FOLIOI_FRAME_CACHED || id->kind == FOLIOI_FRAME_SEQUENCE,
            "a frame's kind is %d", (int)id->kind);
    REQUIRE(id->group >= 0 && id->group < file->num_layer_groups,
            "a frame's group is %d, outside [0, %d)", id->group, file->num_layer_groups);
    REQUIRE(id->ids_bytes >= 0 && id->ids_bytes <= file->ids_bytes &&
                (id->ids != NULL || id->ids_bytes == 0),
            "a frame's ids have %d bytes, outside [0, %d], or are NULL", id->ids_bytes,
            file->ids_bytes);
    int64_t most = file->payload_bytes[id->group];
    REQUIRE(bytes >= 0 && bytes <= most, "a frame of group %d has %lld bytes, outside [0, %lld]",
            id->group, (long long)bytes, (long long)most);
    return FOLIO_OK;
}

/* Header last: until it is whole, the frame is empty. */
static folio_status write_frame(folioi_store *store, int32_t i, const void *ids,
                                const void *payload, char *head)
{
    folioi_store_file *file = &store->file;
    frame_entry *entry = &store->entries[i];
    const folioi_frame_info *info = &entry->info;
    int64_t at = frame_offset(file, i + 1), end = file->head_bytes + info->payload_bytes;
    int64_t header_bytes = sizeof(folioi_frame_header), before = entry->bytes;
    memset(head, 0, (size_t)header_bytes);
    entry->bytes = max_i64(before, end);
    TRY(folioi_store_file_write(file, head, header_bytes, at));
    TRY(folioi_store_file_write(file, payload, info->payload_bytes, at + file->head_bytes));
    if (before > end) TRY(folioi_store_file_clear(file, before - end, at + end));
    entry->bytes = end;
    folioi_head_encode(file, i + 1, info, ids, payload, head);
    return folioi_store_file_write(file, head, file->head_bytes, at);
}

/*
 * The written frame i enters the table. Returns the frame that has lost its place, now the caller's:
 * the one of the same name before it; or i itself where all was forgotten meanwhile; or NONE.
 */
static int32_t publish(folioi_store *store, int32_t i)
{
    const folioi_frame_info *info = &store->entries[i].info;
    store->stats.writes++;
    if (info->kind == FOLIOI_FRAME_CACHED && info->epoch != store->file.epoch) return i;
    int32_t old = find(store, info->key, info->group, info->kind);
    if (old != NONE) {
        blocks_retain(&store->frames, old);
        leave(store, old);
    }
    enter(store, i);
    return old;
}

static folio_status put_frame(folioi_store *store, int32_t i, const folioi_frame_id *id,
                              const void *payload, char *head)
{
    folio_status status = write_frame(store, i, id->ids, payload, head);
    /* A head that was written in part is torn: better an empty one, where that can be written. */
    if (status != FOLIO_OK) (void)folioi_store_file_wipe(&store->file, i + 1);
    int32_t loser = NONE;
    pthread_mutex_lock(&store->lock);
    if (status == FOLIO_OK) loser = publish(store, i);
    else store->stats.errors++;
    if (loser != i) blocks_release(&store->frames, i);
    pthread_mutex_unlock(&store->lock);
    if (loser != NONE) discard(store, loser);
    return status;
}

static folio_status put(folioi_store *store, const folioi_frame_id *id, const void *payload,
                        int64_t bytes, bool *took)
{
    TRY(check_put(store, id, bytes));
    void *head;
    TRY(folioi_alloc(&store->allocator, store->file.head_bytes, "a frame's head", &head));
    folioi_frame_info info = folioi_frame_describe(&store->file, id, bytes);
    folioi_frame_id gone = {.ids = NULL};
    folio_status status = FOLIO_OK;
    bool replaced = false;
    int32_t i = NONE;

    wipe_forgotten(store); /* their frames may be the only ones */
    pthread_mutex_lock(&store->lock);
    /* Held: the old frame is not taken for the new one, and is the last used afterwards. */
    int32_t old = find(store, id->key, id->group, id->kind);
    if (old != NONE) blocks_retain(&store->frames, old);
    bool there = old != NONE && id->kind == FOLIOI_FRAME_CACHED &&
                 same_block(&info, &store->entries[old].info);
    if (!there) i = take_frame(store, &replaced, &gone);
    if (i != NONE) {
        info.stamp = ++store->stamp;
        info.epoch = store->file.epoch;
        store->entries[i].info = info;
        if (id->kind == FOLIOI_FRAME_SEQUENCE && store->promised > 0) store->promised--;
        *took = true;
    } else if (!there) {
        status = folioi_fail(
            FOLIO_ERR_FULL, "the store is full: all of its %lld frames hold sequences, or are busy",
            (long long)store->frames.num);
    }
    folioi_replaced_fn fn = store->replaced;
    void *user = store->replaced_user;
    pthread_mutex_unlock(&store->lock);

    if (replaced && fn != NULL) fn(user, &gone);
    if (i != NONE) status = put_frame(store, i, id, payload, head);
    if (old != NONE) {
        pthread_mutex_lock(&store->lock);
        blocks_release(&store->frames, old);
        pthread_mutex_unlock(&store->lock);
    }
    folioi_free(&store->allocator, head, store->file.head_bytes);
    return status;
}

folio_status folioi_store_put(folioi_store *store, const folioi_frame_id *id, const void *payload,
                              int64_t bytes)
{
    bool took = false;
    folio_status status = put(store, id, payload, bytes, &took);
    if (id->kind != FOLIOI_FRAME_SEQUENCE || took) return status;
    pthread_mutex_lock(&store->lock); /* its promise is used up all the same */
    if (store->promised > 0) store->promised--;
    pthread_mutex_unlock(&store->lock);
    return status;
}

/* ------------------------------------------------------------------------------------------ get */

typedef enum read_outcome { READ_GOOD, READ_TORN, READ_FAILED } read_outcome;

/* Of a held frame: is what lies there what the table says, and the payload whole? */
static read_outcome read_frame(folioi_store *store, int32_t i, const folioi_frame_id *id,
                               const folioi_frame_info *want, void *payload, char *head)
{
    folioi_store_file *file = &store->file;
    folioi_frame_info info;
    folioi_seal seal;
    int64_t at = frame_offset(file, i + 1), n = sizeof(folioi_frame_header) + want->ids_bytes;
    int64_t got = folioi_store_file_read(file, head, n, at);
    if (got < 0) return READ_FAILED;
    if (got < n || folioi_head_decode(file, i + 1, head, &info, &seal) != FOLIOI_HEAD_WHOLE ||
        !same_block(&info, want) || info.epoch != want->epoch || info.stamp != want->stamp)
        return READ_TORN;
    if (want->ids_bytes > 0 &&
        memcmp(head + sizeof(folioi_frame_header), id->ids, (size_t)want->ids_bytes) != 0)
        return READ_TORN;
    n = want->payload_bytes;
    got = folioi_store_file_read(file, payload, n, at + file->head_bytes);
    if (got < 0) return READ_FAILED;
    return got == n && folioi_payload_is(file, payload, n, &seal) ? READ_GOOD : READ_TORN;
}

/* The held frame was read: counted, given back, and dropped where it was not good. */
static void end_read(folioi_store *store, int32_t i, read_outcome outcome)
{
    pthread_mutex_lock(&store->lock);
    bool dropped = outcome != READ_GOOD && is_known(store, i);
    bool cached = store->entries[i].info.kind == FOLIOI_FRAME_CACHED;
    folioi_frame_id gone = id_of(&store->entries[i].info);
    folioi_replaced_fn fn = store->replaced;
    void *user = store->replaced_user;
    if (outcome == READ_GOOD) store->stats.reads++;
    if (outcome == READ_FAILED) store->stats.errors++;
    /* Out of the table: dropped, and wiped, while it was read. That is no fault of the file. */
    if (outcome == READ_TORN && dropped) store->stats.warnings++;
    if (dropped) leave(store, i);
    else blocks_release(&store->frames, i);
    pthread_mutex_unlock(&store->lock);
    if (dropped) discard(store, i);
    if (dropped && cached && fn != NULL) fn(user, &gone);
}

folio_status folioi_store_get(folioi_store *store, const folioi_frame_id *id, void *payload,
                              int64_t bytes, bool *found)
{
    *found = false;
    if (id->ids_bytes < 0 || (id->ids == NULL && id->ids_bytes > 0)) return FOLIO_OK;
    folioi_frame_info want = folioi_frame_describe(&store->file, id, bytes);
    pthread_mutex_lock(&store->lock);
    int32_t i = find(store, id->key, id->group, id->kind);
    if (i != NONE && !same_block(&store->entries[i].info, &want)) i = NONE;
    if (i != NONE) {
        blocks_retain(&store->frames, i);
        want = store->entries[i].info;
    }
    pthread_mutex_unlock(&store->lock);
    if (i == NONE) return FOLIO_OK;

    void *head;
    folio_status status =
        folioi_alloc(&store->allocator, store->file.head_bytes, "a frame's head", &head);
    if (status != FOLIO_OK) {
        pthread_mutex_lock(&store->lock);
        blocks_release(&store->frames, i);
        pthread_mutex_unlock(&store->lock);
        return status;
    }
    read_outcome outcome = read_frame(store, i, id, &want, payload, head);
    *found = outcome == READ_GOOD;
    end_read(store, i, outcome);
    folioi_free(&store->allocator, head, store->file.head_bytes);
    return FOLIO_OK;
}

/* ------------------------------------------------------------------------------------- the rest */

bool folioi_store_has(folioi_store *store, const folioi_frame_id *id)
{
    pthread_mutex_lock(&store->lock);
    int32_t i = find(store, id->key, id->group, id->kind);
    bool there = i != NONE && key_equal(store->entries[i].info.parent, id->parent) &&
                 key_equal(store->entries[i].info.digest, id->digest) &&
                 store->entries[i].info.salt == id->salt;
    pthread_mutex_unlock(&store->lock);
    return there;
}

void folioi_store_drop(folioi_store *store, const folioi_frame_id *id)
{
    pthread_mutex_lock(&store->lock);
    int32_t i = find(store, id->key, id->group, id->kind);
    if (i != NONE) {
        blocks_retain(&store->frames, i);
        leave(store, i);
    }
    pthread_mutex_unlock(&store->lock);
    if (i != NONE) discard(store, i);
}

folio_status folioi_store_forget(folioi_store *store)
{
    uint64_t epoch;
    TRY(folioi_store_random(&epoch));
    pthread_mutex_lock(&store->forgetting);
    pthread_mutex_lock(&store->lock);
    store->file.epoch = epoch; /* ends the puts under way, too */
    for (int64_t i = 0; i < store->frames.num; i++)
        if (is_known(store, i) && store->entries[i].info.kind == FOLIOI_FRAME_CACHED)
            leave(store, (int32_t)i);
    pthread_mutex_unlock(&store->lock);
    folio_status status = folioi_store_file_save_epoch(&store->file, epoch);
    pthread_mutex_unlock(&store->forgetting);
    return status;
}

void folioi_store_forget_salt(folioi_store *store, uint64_t salt)
{
    pthread_mutex_lock(&store->lock);
    for (int64_t i = 0; i < store->frames.num; i++) {
        const folioi_frame_info *info = &store->entries[i].info;
        if (!is_known(store, i) || info->kind != FOLIOI_FRAME_CACHED || info->salt != salt)
            continue;
        blocks_retain(&store->frames, (int32_t)i);
        leave(store, (int32_t)i);
        store->frames.block[i].next = store->forgotten;
        store->forgotten = (int32_t)i;
        store->wiping++;
    }
    pthread_mutex_unlock(&store->lock);
}

static int64_t available(const folioi_store *store)
{
    return blocks_available(&store->frames) + store->wiping - store->promised;
}

int64_t folioi_store_available(folioi_store *store)
{
    pthread_mutex_lock(&store->lock);
    int64_t n = available(store);
    pthread_mutex_unlock(&store->lock);
    return n < 0 ? 0 : n; /* frames being read count for nobody */
}

bool folioi_store_promise(folioi_store *store, int64_t n)
{
    pthread_mutex_lock(&store->lock);
    bool there = n == 0 || n <= available(store);
    if (there) store->promised += n;
    pthread_mutex_unlock(&store->lock);
    return there;
}

void folioi_store_unpromise(folioi_store *store, int64_t n)
{
    pthread_mutex_lock(&store->lock);
    store->promised -= n;
    pthread_mutex_unlock(&store->lock);
}

/* One free frame that may hold something; *more false: there is none, and nobody else has one. */
static folio_status wipe_frame(folioi_store *store, bool *more)
{
    folioi_blocks *frames = &store->frames;
    pthread_mutex_lock(&store->lock);
    while (frames->num_clean == frames->num_free && store->wiping > 0) await_wiped(store);
    *more = frames->num_clean < frames->num_free;
    int32_t i = *more ? blocks_take(frames, NONE) : NONE;
    store->wiping += *more;
    pthread_mutex_unlock(&store->lock);
    if (i == NONE) return FOLIO_OK;
    folio_status status = folioi_store_file_clear(&store->file, store->entries[i].bytes,
                                                  frame_offset(&store->file, i + 1));
    pthread_mutex_lock(&store->lock);
    if (status == FOLIO_OK) {
        store->entries[i].bytes = 0;
        blocks_release_clean(frames, i);
    } else {
        store->stats.errors++;
        blocks_release(frames, i);
    }
    end_wipe(store);
    pthread_mutex_unlock(&store->lock);
    return status;
}

static folio_status wipe_tail(folioi_store *store)
{
    pthread_mutex_lock(&store->trimming);
    folio_status status = folioi_store_file_clear(
        &store->file, store->tail, frame_offset(&store->file, store->frames.num + 1));
    if (status == FOLIO_OK) store->tail = 0;
    pthread_mutex_unlock(&store->trimming);
    return status;
}

folio_status folioi_store_wipe(folioi_store *store)
{
    folio_status status = FOLIO_OK;
    bool more = true;
    wipe_forgotten(store);
    while (more && status == FOLIO_OK) status = wipe_frame(store, &more);
    return status == FOLIO_OK ? wipe_tail(store) : status;
}

void folioi_store_touch(folioi_store *store, const folioi_frame_id *id)
{
    pthread_mutex_lock(&store->lock);
    int32_t i = find(store, id->key, id->group, FOLIOI_FRAME_CACHED);
    if (i != NONE) {
        blocks_retain(&store->frames, i);
        blocks_release(&store->frames, i);
    }
    pthread_mutex_unlock(&store->lock);
}

void folioi_store_on_replaced(folioi_store *store, folioi_replaced_fn fn, void *user)
{
    pthread_mutex_lock(&store->lock);
    store->replaced = fn;
    store->replaced_user = user;
    pthread_mutex_unlock(&store->lock);
}

void folioi_store_each(folioi_store *store, folioi_replaced_fn fn, void *user)
{
    pthread_mutex_lock(&store->lock);
    for (int64_t i = 0; i < store->frames.num; i++) {
        const folioi_frame_info *info = &store->entries[i].info;
        if (!is_known(store, i) || info->kind != FOLIOI_FRAME_CACHED) continue;
        folioi_frame_id id = id_of(info);
        fn(user, &id);
    }
    pthread_mutex_unlock(&store->lock);
}

folioi_store_stats folioi_store_get_stats(folioi_store *store)
{
    pthread_mutex_lock(&store->lock);
    folioi_store_stats stats = store->stats;
    pthread_mutex_unlock(&store->lock);
    return stats;
}

uint64_t folioi_store_hash_key(const folioi_store *store) { return store->file.hash_key; }

void folioi_store_secret(const folioi_store *store, folioi_key *out)
{
    folioi_store_file_digest_key(&store->file, out);
}
