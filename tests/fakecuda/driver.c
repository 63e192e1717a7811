/* A fake NVIDIA driver: libcuda.so.1 (and libnvidia-ml.so.1) for tests on machines without a GPU.
 *
 * NVIDIA's own bindings load it in the driver's place, so that calls, arguments and structures pass through them as they
 * would on a GPU. machine.py builds it, and shares a folder with it: settings and faults go in, and what each process
 * holds comes out. Device memory is files in that folder, mapped by every process that has opened it. A device address is
 * no address of the processor (BIAS): whoever touches device memory without the driver dies, as on a real GPU.
 *
 * Memory, contexts, handles and sizes are checked at every call. Work in a stream runs late, when somebody waits for any
 * stream, and in an order that is drawn among streams, among the copies of a batch and among the rows of a kernel: what
 * was not waited for has not happened yet, or happened in another order than was hoped for. A source that a batch may
 * read at any time is sometimes read when the batch is submitted.
 *
 * It cannot show what only hardware does: concurrency within a GPU, real speed (the clock is a model), the driver's lazy
 * allocations, its real limits, and how it behaves where its documentation is silent. Events do not exist here.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400, NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, MISALIGNED = 716
};

static const struct { int code; const char *name; } error_names[] = {
    {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"}, {200, "CUDA_ERROR_INVALID_IMAGE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {205, "CUDA_ERROR_MAP_FAILED"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"}, {800, "CUDA_ERROR_NOT_PERMITTED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

#define BIAS (1ull << 50)         /* device addresses begin here */
#define BASE_OFFSET 512u          /* how far behind a page's start plain allocations begin: no more is promised */
#define GRANULE (2ull << 20)      /* of virtual memory */
#define MAX_GPUS 8
#define MAX_FAULTS 32
#define MAX_COUNTERS 256
#define ALIGNED 16                /* what the copy kernel needs of addresses and sizes */
#define ROW_BYTES 24u             /* of the copy kernel's table */
#define TILE_BYTES 16384u         /* more than this of a row, the copy kernel does not copy */
#define DURING_CALL 2
#define ANY_ORDER 3
#define DESTROYED (~0ull)          /* the handle of a stream whose work has yet to run */

typedef uint64_t Address;
typedef struct { char bytes[16]; } Uuid;
typedef struct { char bytes[64]; } IpcHandle;
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;
typedef struct { uint32_t order; Location hints[2]; uint32_t flags; } CopyAttributes;

/* ---- what this process has */

struct physical { /* memory of a GPU: a file, open and locked here as long as this process uses it */
    char path[512];
    int gpu, fd, uses, exportable;
    uint64_t size;
    struct physical *next;
};

enum kind { ALLOC, IPC, VIRTUAL, REGISTERED, HOSTALLOC, KINDS };
static const char *const kind_names[KINDS] = {"alloc", "ipc", "virtual", "host", "hostalloc"};

struct range { /* addresses of one kind, in a list sorted by start */
    enum kind kind;
    Address start;
    uint64_t size, context, generic;
    int gpu, uses, is_accessible;
    struct physical *memory;
    struct range *next;
};

struct work {
    enum { COPY, KERNEL } what;
    Address dst, src;
    uint64_t size;
    int by_kernel, is_gone;
    void *early; /* the source as it was when the batch was submitted */
    struct work *next;
};

struct stream { uint64_t handle, context; int is_blocking; struct work *first, *last; struct stream *next; };
struct generic { uint64_t handle; int holds; struct physical *memory; struct generic *next; };
struct reserved { Address start; uint64_t size; struct reserved *next; };
struct module { uint64_t handle, context; const char *image; uint64_t size; struct module *next; };
struct function { uint64_t handle; struct module *module; struct function *next; };
struct context { uint64_t handle; int uses, broken, fd; char path[512]; };
struct counter { char name[40]; int64_t value; };
struct fault { char function[48]; int result, pid; long nth, times, micros; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_ready, pid, gpus, visible_count, visible[MAX_GPUS], version;
static uint64_t total_bytes, context_bytes, serial, random_state;
static char folder[256], token[32], ledger_path[512];
static int ledger_fd = -1;
static struct counter *ledger;
static struct timespec config_time;
static ino_t config_inode;
static struct { int attribute, value; } attributes[16];
static int attribute_count;
static struct fault faults[MAX_FAULTS];
static int fault_count;
static struct { char name[48]; long calls; } calls[MAX_COUNTERS]; /* since the faults were last changed */
static struct context contexts[MAX_GPUS];
static struct physical *physicals;
static struct range *ranges;
static struct stream *streams;
static struct generic *generics;
static struct reserved *reservations;
static struct module *modules;
static struct function *functions;
static struct timespec gate_time;
static long gate_passed;
static __thread uint64_t stack[64];
static __thread int depth;

static uint64_t new_handle(void) { return 0x70000000u + 16 * ++serial; }

static uint64_t draw(uint64_t below) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state % below;
}

static void add_to(const char *kind, const char *name, int64_t value) {
    char full[40];
    snprintf(full, sizeof full, "%s %s", kind, name);
    for (int i = 0; ledger && i < MAX_COUNTERS; i++) {
        if (!ledger[i].name[0])
            strcpy(ledger[i].name, full);
        if (!strcmp(ledger[i].name, full)) {
            ledger[i].value += value;
            return;
        }
    }
}

static void note_failure(const char *format, ...) { /* something that a real driver punishes, for the test to find */
    char path[512], text[400];
    va_list more;
    va_start(more, format);
    vsnprintf(text, sizeof text, format, more);
    va_end(more);
    snprintf(path, sizeof path, "%s/failures", folder);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        dprintf(fd, "%d: %s\n", pid, text);
        close(fd);
    }
}

/* ---- settings and faults */

static void read_config(void) {
    char path[512], line[256], word[64];
    struct stat found;
    snprintf(path, sizeof path, "%s/config", folder);
    if (stat(path, &found) || (found.st_ino == config_inode && !memcmp(&found.st_mtim, &config_time, sizeof config_time)))
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    config_inode = found.st_ino, config_time = found.st_mtim;
    fault_count = attribute_count = 0;
    memset(calls, 0, sizeof calls);
    while (fgets(line, sizeof line, file)) {
        long long value = 0;
        struct fault fault = {0};
        int attribute, setting;
        if (sscanf(line, "fault %47s %d %ld %ld %d %ld", fault.function, &fault.result, &fault.nth, &fault.times, &fault.pid,
                   &fault.micros) == 6) {
            if (fault_count < MAX_FAULTS)
                faults[fault_count++] = fault;
        } else if (sscanf(line, "attribute %d %d", &attribute, &setting) == 2) {
            attributes[attribute_count].attribute = attribute;
            attributes[attribute_count++].value = setting;
        } else if (sscanf(line, "%63s %lld", word, &value) == 2) {
            if (!strcmp(word, "gpus")) gpus = (int)value;
            if (!strcmp(word, "total_bytes")) total_bytes = (uint64_t)value;
            if (!strcmp(word, "context_bytes")) context_bytes = (uint64_t)value;
            if (!strcmp(word, "version")) version = (int)value;
            if (!strcmp(word, "seed") && !random_state) random_state = (uint64_t)value * 2654435761u + 88172645463325252u;
        }
    }
    fclose(file);
}

static int meet_faults(const char *function) { /* counts a call; sleeps, or returns an error, where one is wanted */
    read_config();
    add_to("count", function, 1);
    int slot = 0;
    while (slot < MAX_COUNTERS - 1 && calls[slot].name[0] && strcmp(calls[slot].name, function))
        slot++;
    snprintf(calls[slot].name, sizeof calls[slot].name, "%s", function);
    long nth = ++calls[slot].calls, micros = 0;
    int result = OK;
    for (int i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->function, function) || (fault->pid && fault->pid != pid))
            continue;
        if (nth >= fault->nth && nth < fault->nth + fault->times) {
            micros += fault->micros;
            result = result ? result : fault->result;
        }
    }
    struct timespec since = config_time;
    for (; micros > 0; micros -= 1000) { /* the others go on meanwhile; the sleep ends when the faults are changed */
        pthread_mutex_unlock(&lock);
        usleep(1000);
        pthread_mutex_lock(&lock);
        read_config();
        if (memcmp(&since, &config_time, sizeof since))
            break;
    }
    return result;
}

/* ---- files that are locked by whoever uses them */

static int make_file(char *path, size_t room, const char *name, uint64_t size) { /* its descriptor, locked; or -1 */
    char fresh[512];
    snprintf(fresh, sizeof fresh, "%s/new-%s-%lu", folder, token, (unsigned long)++serial);
    snprintf(path, room, "%s/%s", folder, name);
    int fd = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)size) || flock(fd, LOCK_SH) || rename(fresh, path)) { /* no other sees it before its lock */
        unlink(fresh);
        close(fd);
        return -1;
    }
    return fd;
}

static int lock_scan(void) { /* two that look for unused files would take each other for users */
    char path[512];
    snprintf(path, sizeof path, "%s/scan", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        flock(fd, LOCK_EX);
    return fd;
}

static int remove_unused(const char *path) { /* whether nobody uses this file; under the lock of lock_scan */
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return 1;
    int is_unused = !flock(fd, LOCK_EX | LOCK_NB);
    if (is_unused)
        unlink(path);
    close(fd);
    return is_unused;
}

static void close_file(int fd, const char *path) {
    close(fd);
    int scan = lock_scan();
    remove_unused(path);
    close(scan);
}

static uint64_t used_bytes(int gpu) { /* of a GPU, by all processes; what several have mapped counts once */
    char memory[32], context[32], path[512];
    uint64_t used = 0;
    struct dirent *entry;
    struct stat found;
    snprintf(memory, sizeof memory, "mem-%d-", gpu);
    snprintf(context, sizeof context, "ctx-%d-", gpu);
    int scan = lock_scan();
    DIR *directory = opendir(folder);
    while (directory && (entry = readdir(directory))) {
        int is_memory = !strncmp(entry->d_name, memory, strlen(memory));
        if (!is_memory && strncmp(entry->d_name, context, strlen(context)))
            continue;
        snprintf(path, sizeof path, "%s/%.200s", folder, entry->d_name);
        if (!stat(path, &found) && !remove_unused(path))
            used += (uint64_t)found.st_size - (is_memory && entry->d_name[strlen(memory)] == 'a' ? BASE_OFFSET : 0);
    }
    if (directory)
        closedir(directory);
    close(scan);
    return used;
}

/* ---- ranges and physical memory */

static struct range *range_at(Address address) {
    for (struct range *range = ranges; range && range->start <= address; range = range->next)
        if (address < range->start + range->size)
            return range;
    return NULL;
}

static struct range *overlapping(Address start, uint64_t size) { /* the first one */
    for (struct range *range = ranges; range && range->start < start + size; range = range->next)
        if (range->start + range->size > start)
            return range;
    return NULL;
}

static struct range *starting(Address address, enum kind kind) {
    struct range *range = range_at(address);
    return range && range->start == address && range->kind == kind ? range : NULL;
}

static struct range *add_range(struct range made) {
    struct range *range = malloc(sizeof *range), **place = &ranges;
    *range = made;
    while (*place && (*place)->start < range->start)
        place = &(*place)->next;
    range->next = *place;
    *place = range;
    add_to("held", kind_names[range->kind], 1);
    return range;
}

static void remove_range(struct range *gone) {
    struct range **place = &ranges;
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    add_to("held", kind_names[gone->kind], -1);
    free(gone);
}

static struct physical *hold(struct physical made) { /* use memory here once more; takes over the descriptor */
    struct physical *known = physicals;
    while (known && strcmp(known->path, made.path))
        known = known->next;
    if (known) {
        close(made.fd);
    } else {
        known = malloc(sizeof *known);
        *known = made;
        known->next = physicals;
        physicals = known;
    }
    known->uses++;
    return known;
}

static void drop(struct physical *gone) {
    if (--gone->uses)
        return;
    struct physical **place = &physicals;
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    close_file(gone->fd, gone->path);
    free(gone);
}

static int make_memory(int gpu, uint64_t size, char kind, struct physical *made) { /* kind: plain 'a', virtual 'x', 'c' */
    char name[128];
    uint64_t used = used_bytes(gpu);
    if (size > total_bytes || used > total_bytes - size)
        return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "mem-%d-%c-%s-%lu", gpu, kind, token, (unsigned long)++serial);
    *made = (struct physical){.gpu = gpu, .size = size, .exportable = kind == 'x'};
    made->fd = make_file(made->path, sizeof made->path, name, size + (kind == 'a' ? BASE_OFFSET : 0));
    return made->fd < 0 ? OUT_OF_MEMORY : OK;
}

static int map_plain(struct physical *memory, enum kind kind, uint64_t context, Address *out) {
    void *at = mmap(NULL, BASE_OFFSET + memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    if (at == MAP_FAILED)
        return MAP_FAILED_;
    *out = (Address)at + BASE_OFFSET + BIAS;
    add_range((struct range){.kind = kind, .start = *out, .size = memory->size, .context = context, .gpu = memory->gpu,
                             .uses = 1, .is_accessible = 1, .memory = memory});
    return OK;
}

static void free_range(struct range *gone) { /* of any kind but VIRTUAL */
    if (gone->kind == ALLOC || gone->kind == IPC) {
        munmap((void *)(gone->start - BIAS - BASE_OFFSET), BASE_OFFSET + gone->size);
        drop(gone->memory);
    } else if (gone->kind == HOSTALLOC) {
        munmap((void *)gone->start, gone->size);
    }
    remove_range(gone);
}

/* Where these bytes are in this process (0: they may not be touched), and whether a GPU reaches them. */
static void *reach(Address address, uint64_t size, uint64_t context, int by_kernel, int *is_reached) {
    struct range *range = overlapping(address, size);
    *is_reached = 1;
    if (!size)
        return NULL;
    if (address < BIAS) {
        if (!range && !by_kernel) {
            *is_reached = 0; /* pageable memory */
            return (void *)address;
        }
        int is_inside = range && range->start <= address && address + size <= range->start + range->size;
        return is_inside ? (void *)address : NULL; /* else partly registered, or across two registrations */
    }
    for (Address covered = address; covered < address + size; range = range->next) {
        if (!range || range->start > covered || !range->is_accessible)
            return NULL;
        if (range->kind != VIRTUAL && (range->context != context || range->start + range->size < address + size))
            return NULL;
        covered = range->start + range->size;
    }
    return (void *)(address - BIAS);
}

/* ---- contexts and calls */

static struct context *find_context(uint64_t handle) {
    for (int gpu = 0; handle && gpu < MAX_GPUS; gpu++)
        if (contexts[gpu].handle == handle)
            return &contexts[gpu];
    return NULL;
}

static struct context *current(void) { return depth ? find_context(stack[depth - 1]) : NULL; }

static int gpu_of(int device) { return device >= 0 && device < visible_count ? visible[device] : -1; }

static int end(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static int begin(const char *function, int needs_context) {
    pthread_mutex_lock(&lock);
    if (!is_ready || pid != getpid()) /* a process that forked has lost the driver */
        return end(NOT_INITIALIZED);
    int result = meet_faults(function);
    if (!result && needs_context)
        result = current() ? current()->broken : INVALID_CONTEXT;
    return result ? end(result) : OK;
}

#define CALL(function) do { int error_ = begin(function, 0); if (error_) return error_; } while (0)
#define CALL_IN_CONTEXT(function) do { int error_ = begin(function, 1); if (error_) return error_; } while (0)

/* ---- streams */

static struct stream *stream_of(uint64_t handle) {
    uint64_t context = current()->handle;
    int is_default = handle == 0 || handle == 1;
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->handle == (is_default ? 0 : handle))
            return stream;
    if (!is_default)
        return NULL;
    struct stream *made = calloc(1, sizeof *made);
    *made = (struct stream){.context = context, .is_blocking = 1, .next = streams};
    return streams = made;
}

static void put(struct stream *stream, struct work made) {
    struct work *work = malloc(sizeof *work);
    *work = made;
    work->next = NULL;
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
}

static int touches(struct work *work, Address start, Address stop) {
    Address places[] = {work->dst, work->src};
    for (int i = 0; i < 2; i++)
        if (places[i] && places[i] < stop && start < places[i] + work->size)
            return 1;
    return 0;
}

static void memory_goes(Address start, uint64_t size, const char *how) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct work *work = stream->first; work; work = work->next)
            if (!work->is_gone && touches(work, start, start + size)) {
                work->is_gone = 1;
                note_failure("%s of %#lx, %lu bytes, with work on it queued", how, start, size);
            }
}

static int is_held_by_gate(void) { /* whether a gate stands before the next copy */
    char path[512], text[32] = "";
    struct stat found;
    snprintf(path, sizeof path, "%s/gate", folder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &found) || read(fd, text, sizeof text - 1) < 0) {
        memset(&gate_time, 0, sizeof gate_time);
        if (fd >= 0)
            close(fd);
        return 0;
    }
    close(fd);
    if (memcmp(&gate_time, &found.st_mtim, sizeof gate_time))
        gate_time = found.st_mtim, gate_passed = 0;
    if (gate_passed++ < atol(text))
        return 0;
    snprintf(path, sizeof path, "%s/held-%d", folder, pid);
    close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    return 1;
}

static int run_copy(struct stream *stream, struct work *work) {
    int reached, fault = meet_faults("copy");
    if (fault)
        return fault;
    void *dst = reach(work->dst, work->size, stream->context, work->by_kernel, &reached);
    void *src = reach(work->src, work->size, stream->context, work->by_kernel, &reached);
    if (work->is_gone || !dst || !src)
        return ILLEGAL_ADDRESS;
    memmove(dst, work->early ? work->early : src, work->size);
    return OK;
}

static int run_kernel(struct stream *stream, struct work *work) { /* rows of (destination, source, bytes) */
    uint64_t count = work->size / ROW_BYTES;
    int reached;
    uint64_t *rows = reach(work->src, work->size, stream->context, 1, &reached);
    if (work->is_gone || !rows)
        return ILLEGAL_ADDRESS;
    add_to("count", "kernel_copies", (int64_t)count);
    uint64_t *order = malloc(count * sizeof *order);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t other = draw(i + 1);
        order[i] = order[other], order[other] = i;
    }
    struct work *after = stream->first;
    stream->first = stream->last = NULL;
    int result = OK;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t *row = rows + 3 * order[i];
        if ((row[0] | row[1] | row[2]) % ALIGNED) {
            note_failure("kernel row %#lx <- %#lx, %lu bytes is not aligned", row[0], row[1], row[2]);
            result = MISALIGNED;
        }
        uint64_t size = row[2] < TILE_BYTES ? row[2] : TILE_BYTES;
        if (size)
            put(stream, (struct work){.what = COPY, .dst = row[0], .src = row[1], .size = size, .by_kernel = 1});
    }
    free(order);
    if (stream->last)
        stream->last->next = after;
    else
        stream->first = after;
    for (struct work *last = stream->first; last; last = last->next)
        stream->last = last;
    return result;
}

static void run_one(struct stream *stream) { /* the next work of a stream; the lock is let go while a gate holds it */
    if (is_held_by_gate()) {
        pthread_mutex_unlock(&lock);
        usleep(1000);
        pthread_mutex_lock(&lock);
        return;
    }
    struct work *work = stream->first;
    struct context *context = find_context(stream->context);
    stream->first = work->next;
    if (!stream->first)
        stream->last = NULL;
    if (context && !context->broken) {
        int result = work->what == COPY ? run_copy(stream, work) : run_kernel(stream, work);
        if (result) /* stays: every call in this context answers with it from now on */
            context->broken = result;
    }
    free(work->early);
    free(work);
}

static struct stream *draw_busy(void) {
    struct stream *chosen = NULL;
    uint64_t count = 0;
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->first && !draw(++count))
            chosen = stream;
    return chosen;
}

static int is_busy(uint64_t context, struct stream *only, int only_blocking) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->first && (!only || stream == only) &&
            (!only_blocking || stream->is_blocking))
            return 1;
    return 0;
}

static int drain(struct stream *only, int only_blocking) { /* runs work of any stream until these streams are empty */
    uint64_t handle = current()->handle;
    while (is_busy(handle, only, only_blocking))
        run_one(draw_busy());
    struct context *context = find_context(handle);
    return context ? context->broken : INVALID_CONTEXT;
}

static void end_context(struct context *context) {
    if (is_busy(context->handle, NULL, 0))
        note_failure("a context ended with work in its streams");
    for (struct range *range = ranges, *next; range; range = next) {
        next = range->next;
        if (range->context != context->handle)
            continue;
        if (range->kind == REGISTERED && !context->broken && !fault_count) /* it ends the registration, but nobody says so */
            note_failure("a context ended with %lu bytes registered in it", range->size);
        free_range(range);
    }
    for (struct stream **place = &streams; *place;) {
        struct stream *stream = *place;
        if (stream->context != context->handle) {
            place = &stream->next;
            continue;
        }
        for (struct work *work = stream->first, *next; work; work = next) {
            next = work->next;
            free(work->early);
            free(work);
        }
        *place = stream->next;
        add_to("held", "streams", stream->handle && stream->handle != DESTROYED ? -1 : 0);
        free(stream);
    }
    for (struct module *module = modules; module; module = module->next)
        if (module->context == context->handle)
            module->handle = module->context = 0, add_to("held", "modules", -1);
    close_file(context->fd, context->path);
    *context = (struct context){0};
}

/* ---- the driver and its devices */

static void uuid_of(int gpu, Uuid *out) {
    memcpy(out->bytes, "a fake CUDA GPU", 15);
    out->bytes[15] = (char)gpu;
}

static void text_of(int gpu, char *out) { /* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
    Uuid uuid;
    uuid_of(gpu, &uuid);
    out += sprintf(out, "GPU");
    for (int i = 0; i < 16; i++)
        out += sprintf(out, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
}

static void find_visible(void) { /* by CUDA_VISIBLE_DEVICES, which ends at the first name that is none */
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!wanted) {
        for (; visible_count < gpus; visible_count++)
            visible[visible_count] = visible_count;
        return;
    }
    char list[512], *rest = list, *name, uuid[64];
    snprintf(list, sizeof list, "%s", wanted);
    while ((name = strsep(&rest, ",")) && visible_count < MAX_GPUS) {
        int gpu = 0;
        for (; gpu < gpus; gpu++) {
            text_of(gpu, uuid);
            if (!strcmp(name, uuid) || (strlen(name) == 1 && name[0] == '0' + gpu))
                break;
        }
        if (gpu == gpus)
            return;
        visible[visible_count++] = gpu;
    }
}

int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    if (is_ready)
        return end(pid != getpid() ? NOT_INITIALIZED : visible_count ? meet_faults("cuInit") : NO_DEVICE);
    const char *where = getenv("FAKECUDA");
    struct timespec now;
    char path[512], name[64];
    snprintf(folder, sizeof folder, "%s", where ? where : "");
    snprintf(path, sizeof path, "%s/config", folder);
    if (flags || !where || access(path, R_OK))
        return end(flags ? INVALID_VALUE : NO_DEVICE);
    clock_gettime(CLOCK_REALTIME, &now);
    pid = getpid();
    random_state = 0;
    config_inode = 0;
    snprintf(token, sizeof token, "%d-%lx", pid, (unsigned long)(now.tv_sec * 1000000000 + now.tv_nsec));
    read_config();
    find_visible();
    snprintf(name, sizeof name, "%.40s.ledger", token);
    ledger_fd = make_file(ledger_path, sizeof ledger_path, name, MAX_COUNTERS * sizeof *ledger);
    if (ledger_fd < 0)
        return end(OUT_OF_MEMORY);
    ledger = mmap(NULL, MAX_COUNTERS * sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd, 0);
    is_ready = 1;
    return end(visible_count ? meet_faults("cuInit") : NO_DEVICE);
}

/* The fake's own: forgets everything, as a process that ends does. */
void fakecuda_leave(void) {
    pthread_mutex_lock(&lock);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        if (contexts[gpu].handle)
            end_context(&contexts[gpu]);
    while (generics) {
        struct generic *next = generics->next;
        drop(generics->memory);
        free(generics);
        generics = next;
    }
    for (struct range *range = ranges, *next; range; range = next) { /* virtual memory is left in place */
        next = range->next;
        if (range->kind == VIRTUAL)
            drop(range->memory);
        remove_range(range);
    }
    reservations = NULL;
    if (is_ready) {
        munmap(ledger, MAX_COUNTERS * sizeof *ledger);
        ledger = NULL;
        close_file(ledger_fd, ledger_path);
    }
    is_ready = depth = 0;
    pthread_mutex_unlock(&lock);
}

int cuDriverGetVersion(int *out) {
    CALL("cuDriverGetVersion");
    *out = version;
    return end(OK);
}

int cuGetErrorName(int code, const char **out) {
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].code == code) {
            *out = error_names[i].name;
            return OK;
        }
    *out = NULL;
    return INVALID_VALUE;
}

int cuGetErrorString(int code, const char **out) { return cuGetErrorName(code, out); }

int cuDeviceGetCount(int *out) {
    CALL("cuDeviceGetCount");
    *out = visible_count;
    return end(OK);
}

int cuDeviceGet(int *out, int ordinal) {
    CALL("cuDeviceGet");
    *out = ordinal;
    return end(gpu_of(ordinal) < 0 ? INVALID_DEVICE : OK);
}

int cuDeviceGetName(char *out, int room, int device) {
    CALL("cuDeviceGetName");
    snprintf(out, (size_t)room, "Fake GPU %d", gpu_of(device));
    return end(gpu_of(device) < 0 ? INVALID_DEVICE : OK);
}

int cuDeviceGetUuid_v2(Uuid *out, int device) {
    CALL("cuDeviceGetUuid");
    if (gpu_of(device) < 0)
        return end(INVALID_DEVICE);
    uuid_of(gpu_of(device), out);
    return end(OK);
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    CALL("cuDeviceGetAttribute");
    if (gpu_of(device) < 0)
        return end(INVALID_DEVICE);
    *out = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1; /* compute capability, multiprocessors */
    for (int i = 0; i < attribute_count; i++)
        if (attributes[i].attribute == attribute)
            *out = attributes[i].value;
    return end(OK);
}

/* ---- contexts */

int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    CALL("cuDevicePrimaryCtxSetFlags");
    return end(gpu_of(device) < 0 ? INVALID_DEVICE : flags > 0xff ? INVALID_VALUE : OK);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    CALL("cuDevicePrimaryCtxGetState");
    if (gpu_of(device) < 0)
        return end(INVALID_DEVICE);
    *flags = 0, *is_active = contexts[gpu_of(device)].handle != 0;
    return end(OK);
}

int cuDevicePrimaryCtxRetain(uint64_t *out, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    int gpu = gpu_of(device);
    if (gpu < 0)
        return end(INVALID_DEVICE);
    struct context *context = &contexts[gpu];
    if (!context->handle) {
        char name[128];
        if (used_bytes(gpu) + context_bytes > total_bytes)
            return end(OUT_OF_MEMORY);
        snprintf(name, sizeof name, "ctx-%d-%d-%s", gpu, pid, token);
        context->fd = make_file(context->path, sizeof context->path, name, context_bytes);
        if (context->fd < 0)
            return end(OUT_OF_MEMORY);
        context->handle = new_handle();
    }
    context->uses++;
    *out = context->handle;
    return end(OK);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    CALL("cuDevicePrimaryCtxRelease");
    int gpu = gpu_of(device);
    if (gpu < 0 || !contexts[gpu].handle)
        return end(gpu < 0 ? INVALID_DEVICE : INVALID_CONTEXT);
    if (!--contexts[gpu].uses)
        end_context(&contexts[gpu]);
    return end(OK);
}

int cuCtxPushCurrent_v2(uint64_t context) {
    CALL("cuCtxPushCurrent");
    if (!find_context(context) || depth == 64)
        return end(INVALID_CONTEXT);
    stack[depth++] = context;
    return end(OK);
}

int cuCtxPopCurrent_v2(uint64_t *out) {
    CALL("cuCtxPopCurrent");
    if (!depth)
        return end(INVALID_CONTEXT);
    depth--;
    if (out)
        *out = stack[depth];
    return end(OK);
}

int cuCtxGetCurrent(uint64_t *out) {
    CALL("cuCtxGetCurrent");
    *out = depth ? stack[depth - 1] : 0;
    return end(OK);
}

int cuCtxSetCurrent(uint64_t context) {
    CALL("cuCtxSetCurrent");
    if (context && !find_context(context))
        return end(INVALID_CONTEXT);
    depth -= depth > 0;
    if (context)
        stack[depth++] = context;
    return end(OK);
}

int cuCtxGetDevice(int *out) {
    CALL_IN_CONTEXT("cuCtxGetDevice");
    for (*out = 0; visible[*out] != (int)(current() - contexts);)
        ++*out;
    return end(OK);
}

int cuCtxSynchronize(void) {
    CALL_IN_CONTEXT("cuCtxSynchronize");
    return end(drain(NULL, 0));
}

/* ---- memory */

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CALL_IN_CONTEXT("cuMemGetInfo");
    *total = total_bytes;
    *free_bytes = total_bytes - used_bytes((int)(current() - contexts));
    return end(OK);
}

int cuMemAlloc_v2(Address *out, size_t size) {
    CALL_IN_CONTEXT("cuMemAlloc");
    struct physical made;
    int result = size ? make_memory((int)(current() - contexts), size, 'a', &made) : INVALID_VALUE;
    return end(result ? result : map_plain(hold(made), ALLOC, current()->handle, out));
}

int cuMemFree_v2(Address address) {
    CALL_IN_CONTEXT("cuMemFree");
    struct range *range = starting(address, ALLOC);
    if (!range)
        return end(INVALID_VALUE);
    memory_goes(range->start, range->size, "cuMemFree");
    free_range(range);
    return end(OK);
}

int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    CALL_IN_CONTEXT("cuMemHostAlloc");
    (void)flags;
    *out = size ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (*out == MAP_FAILED)
        return end(size ? OUT_OF_MEMORY : INVALID_VALUE);
    add_range((struct range){.kind = HOSTALLOC, .start = (Address)*out, .size = size, .context = current()->handle});
    return end(OK);
}

int cuMemFreeHost(void *address) {
    CALL_IN_CONTEXT("cuMemFreeHost");
    struct range *range = starting((Address)address, HOSTALLOC);
    if (!range)
        return end(INVALID_VALUE);
    memory_goes(range->start, range->size, "cuMemFreeHost");
    free_range(range);
    return end(OK);
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    CALL_IN_CONTEXT("cuMemHostRegister");
    if (!(flags & 1))
        note_failure("cuMemHostRegister without PORTABLE: other contexts see pageable memory");
    if (!address || !size || flags & ~3u)
        return end(INVALID_VALUE);
    if (overlapping((Address)address, size))
        return end(ALREADY_REGISTERED);
    add_range((struct range){.kind = REGISTERED, .start = (Address)address, .size = size, .context = current()->handle});
    return end(OK);
}

int cuMemHostUnregister(void *address) {
    CALL_IN_CONTEXT("cuMemHostUnregister");
    struct range *range = starting((Address)address, REGISTERED);
    if (!range)
        return end(NOT_REGISTERED);
    memory_goes(range->start, range->size, "cuMemHostUnregister");
    free_range(range);
    return end(OK);
}

int cuMemGetAddressRange_v2(Address *start, size_t *size, Address address) {
    CALL_IN_CONTEXT("cuMemGetAddressRange");
    struct range *range = range_at(address);
    if (!range)
        return end(NOT_FOUND);
    if (start)
        *start = range->start;
    if (size)
        *size = range->size;
    return end(OK);
}

int cuPointerGetAttribute(void *out, int attribute, Address address) {
    CALL("cuPointerGetAttribute");
    struct range *range = range_at(address);
    if (!range)
        return end(INVALID_VALUE);
    if (attribute == 10) { /* IS_LEGACY_CUDA_IPC_CAPABLE */
        *(int *)out = range->kind == ALLOC;
        return end(OK);
    }
    if (attribute != 12) /* RANGE_SIZE */
        return end(INVALID_VALUE);
    *(size_t *)out = range->size;
    for (struct reserved *area = reservations; area && range->kind == VIRTUAL; area = area->next)
        if (area->start <= range->start && range->start < area->start + area->size)
            *(size_t *)out = area->size;
    return end(OK);
}

/* ---- memory of other processes */

int cuIpcGetMemHandle(IpcHandle *out, Address address) {
    CALL_IN_CONTEXT("cuIpcGetMemHandle");
    struct range *range = range_at(address);
    if (!range || range->kind != ALLOC)
        return end(INVALID_VALUE);
    memset(out, 0, sizeof *out);
    snprintf(out->bytes, sizeof out->bytes, "%s", strrchr(range->memory->path, '/') + 1);
    return end(OK);
}

int cuIpcOpenMemHandle_v2(Address *out, IpcHandle handle, unsigned flags) {
    CALL_IN_CONTEXT("cuIpcOpenMemHandle");
    struct physical opened = {0};
    struct stat found;
    char owner[40] = "", kind = 0;
    int gpu = -1;
    if (flags != 1) /* LAZY_ENABLE_PEER_ACCESS */
        return end(INVALID_VALUE);
    int fields = memchr(handle.bytes, 0, sizeof handle.bytes)
                     ? sscanf(handle.bytes, "mem-%d-%c-%39[0-9a-f]-%39[0-9a-f]", &gpu, &kind, owner, owner + 20) : 0;
    if (fields < 4 || kind != 'a' || strchr(handle.bytes, '/'))
        return end(INVALID_HANDLE);
    snprintf(opened.path, sizeof opened.path, "%s/%s", folder, handle.bytes);
    if (strstr(handle.bytes, token)) /* its own memory */
        return end(INVALID_CONTEXT);
    if (gpu != (int)(current() - contexts))
        return end(INVALID_VALUE);
    for (struct range *range = ranges; range; range = range->next)
        if (range->kind == IPC && range->context == current()->handle && !strcmp(range->memory->path, opened.path)) {
            range->uses++;
            *out = range->start;
            return end(OK);
        }
    opened.fd = open(opened.path, O_RDWR | O_CLOEXEC);
    if (opened.fd < 0)
        return end(INVALID_HANDLE);
    if (flock(opened.fd, LOCK_SH) || fstat(opened.fd, &found)) {
        close(opened.fd);
        return end(MAP_FAILED_);
    }
    opened.gpu = gpu;
    opened.size = (uint64_t)found.st_size - BASE_OFFSET;
    return end(map_plain(hold(opened), IPC, current()->handle, out));
}

int cuIpcCloseMemHandle(Address address) {
    CALL_IN_CONTEXT("cuIpcCloseMemHandle");
    struct range *range = starting(address, IPC);
    if (!range || range->context != current()->handle)
        return end(INVALID_VALUE);
    if (!--range->uses) {
        memory_goes(range->start, range->size, "cuIpcCloseMemHandle");
        free_range(range);
    }
    return end(OK);
}

/* ---- virtual memory */

static struct generic *find_generic(uint64_t handle) {
    struct generic *generic = generics;
    while (generic && generic->handle != handle)
        generic = generic->next;
    return generic;
}

static uint64_t add_generic(struct physical *memory, uint64_t handle) {
    struct generic *made = malloc(sizeof *made);
    *made = (struct generic){handle, 1, memory, generics};
    generics = made;
    add_to("held", "generic", 1);
    return handle;
}

int cuMemCreate(uint64_t *out, size_t size, const AllocationProp *prop, unsigned long long flags) {
    CALL("cuMemCreate");
    int gpu = prop->location.type == 1 ? gpu_of(prop->location.id) : -1;
    struct physical made;
    if (flags || prop->type != 1 || gpu < 0 || !size || size % GRANULE)
        return end(gpu < 0 ? INVALID_DEVICE : INVALID_VALUE);
    int result = make_memory(gpu, size, prop->handle_types & 1 ? 'x' : 'c', &made);
    if (!result)
        *out = add_generic(hold(made), new_handle());
    return end(result);
}

int cuMemRelease(uint64_t handle) {
    CALL("cuMemRelease");
    struct generic *generic = find_generic(handle), **place = &generics;
    if (!generic)
        return end(INVALID_VALUE);
    if (--generic->holds)
        return end(OK);
    while (*place != generic)
        place = &(*place)->next;
    *place = generic->next;
    add_to("held", "generic", -1);
    drop(generic->memory);
    free(generic);
    return end(OK);
}

int cuMemRetainAllocationHandle(uint64_t *out, void *address) {
    CALL("cuMemRetainAllocationHandle");
    struct range *range = range_at((Address)address);
    if (!range || range->kind != VIRTUAL)
        return end(INVALID_VALUE);
    struct generic *known = find_generic(range->generic);
    *out = range->generic;
    if (known) {
        known->holds++;
    } else {
        range->memory->uses++;
        add_generic(range->memory, range->generic);
    }
    return end(OK);
}

int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
    CALL("cuMemExportToShareableHandle");
    struct generic *generic = find_generic(handle);
    if (!generic || !generic->memory->exportable || type != 1 || flags)
        return end(INVALID_VALUE);
    *(int *)out = fcntl(generic->memory->fd, F_DUPFD_CLOEXEC, 3);
    return end(OK);
}

int cuMemImportFromShareableHandle(uint64_t *out, void *handle, int type) {
    CALL("cuMemImportFromShareableHandle");
    char link[64], prefix[300];
    struct physical opened = {0};
    struct stat found;
    int fd = (int)(intptr_t)handle;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    snprintf(prefix, sizeof prefix, "%s/mem-", folder);
    if (type != 1 || readlink(link, opened.path, sizeof opened.path - 1) < 0 || fstat(fd, &found) ||
        strncmp(opened.path, prefix, strlen(prefix)) || opened.path[strlen(prefix) + 2] != 'x')
        return end(INVALID_VALUE);
    opened.gpu = atoi(opened.path + strlen(prefix));
    opened.size = (uint64_t)found.st_size;
    opened.exportable = 1;
    opened.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    *out = add_generic(hold(opened), new_handle());
    return end(OK);
}

int cuMemAddressReserve(Address *out, size_t size, size_t alignment, Address wanted, unsigned long long flags) {
    CALL("cuMemAddressReserve");
    (void)alignment, (void)wanted;
    if (!size || size % GRANULE || flags)
        return end(INVALID_VALUE);
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return end(OUT_OF_MEMORY);
    struct reserved *made = malloc(sizeof *made);
    *made = (struct reserved){(Address)at + BIAS, size, reservations};
    reservations = made;
    add_to("held", "reserved", 1);
    *out = made->start;
    return end(OK);
}

int cuMemAddressFree(Address start, size_t size) {
    CALL("cuMemAddressFree");
    for (struct reserved **place = &reservations; *place; place = &(*place)->next) {
        struct reserved *area = *place;
        if (area->start != start || area->size != size || overlapping(start, size))
            continue;
        *place = area->next;
        munmap((void *)(start - BIAS), size);
        free(area);
        add_to("held", "reserved", -1);
        return end(OK);
    }
    return end(INVALID_VALUE);
}

int cuMemMap(Address start, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    CALL("cuMemMap");
    struct generic *generic = find_generic(handle);
    struct reserved *area = reservations;
    while (area && !(area->start <= start && start + size <= area->start + area->size))
        area = area->next;
    if (!generic || !area || offset || flags || size != generic->memory->size || overlapping(start, size))
        return end(INVALID_VALUE);
    void *at = (void *)(start - BIAS);
    if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, generic->memory->fd, 0) == MAP_FAILED)
        return end(MAP_FAILED_);
    generic->memory->uses++;
    add_range((struct range){.kind = VIRTUAL, .start = start, .size = size, .generic = handle, .gpu = generic->memory->gpu,
                             .memory = generic->memory});
    return end(OK);
}

static int is_mapped(Address start, uint64_t size) { /* whether mappings of virtual memory begin and end here */
    struct range *range = starting(start, VIRTUAL);
    for (; range && range->kind == VIRTUAL && range->start == start; range = range->next) {
        if (range->size >= size)
            return range->size == size;
        start += range->size, size -= range->size;
    }
    return 0;
}

int cuMemSetAccess(Address start, size_t size, const AccessDesc *desc, size_t count) {
    CALL("cuMemSetAccess");
    int gpu = count == 1 && desc->location.type == 1 ? gpu_of(desc->location.id) : -1;
    if (gpu < 0 || desc->flags != 3 || !is_mapped(start, size)) /* PROT_READWRITE */
        return end(INVALID_VALUE);
    for (struct range *range = starting(start, VIRTUAL); range && range->start < start + size; range = range->next) {
        if (range->gpu != gpu)
            return end(INVALID_VALUE);
        range->is_accessible = 1;
    }
    return end(OK);
}

int cuMemUnmap(Address start, size_t size) {
    CALL("cuMemUnmap");
    if (!is_mapped(start, size))
        return end(INVALID_VALUE);
    memory_goes(start, size, "cuMemUnmap");
    for (struct range *range; (range = overlapping(start, size));) {
        void *at = (void *)(range->start - BIAS);
        mmap(at, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop(range->memory);
        remove_range(range);
    }
    return end(OK);
}

/* ---- streams and copies */

int cuStreamCreate(uint64_t *out, unsigned flags) {
    CALL_IN_CONTEXT("cuStreamCreate");
    struct stream *made = calloc(1, sizeof *made);
    *made = (struct stream){.handle = new_handle(), .context = current()->handle, .is_blocking = !(flags & 1), .next = streams};
    streams = made;
    add_to("held", "streams", 1);
    *out = made->handle;
    return end(OK);
}

int cuStreamDestroy_v2(uint64_t handle) {
    CALL_IN_CONTEXT("cuStreamDestroy");
    struct stream *stream = handle > 1 ? stream_of(handle) : NULL;
    if (!stream)
        return end(INVALID_HANDLE);
    stream->handle = DESTROYED;
    add_to("held", "streams", -1);
    return end(OK);
}

int cuStreamSynchronize(uint64_t handle) {
    CALL_IN_CONTEXT("cuStreamSynchronize");
    struct stream *stream = stream_of(handle);
    return end(stream ? drain(stream, 0) : INVALID_HANDLE);
}

static int queue_copy(uint64_t handle, Address dst, Address src, uint64_t size) {
    struct stream *stream = stream_of(handle);
    int is_dst_reached, is_src_reached;
    if (!stream)
        return INVALID_HANDLE;
    if (!size)
        return OK;
    if (!reach(dst, size, stream->context, 0, &is_dst_reached) || !reach(src, size, stream->context, 0, &is_src_reached))
        return INVALID_VALUE;
    put(stream, (struct work){.what = COPY, .dst = dst, .src = src, .size = size});
    if (is_dst_reached && is_src_reached)
        return OK;
    add_to("count", "pageable_copies", 1);
    return drain(stream, 0); /* at once, as the driver does */
}

int cuMemcpyHtoDAsync_v2(Address dst, const void *src, size_t size, uint64_t stream) {
    CALL_IN_CONTEXT("cuMemcpyHtoDAsync");
    return end(queue_copy(stream, dst, (Address)src, size));
}

int cuMemcpyDtoHAsync_v2(void *dst, Address src, size_t size, uint64_t stream) {
    CALL_IN_CONTEXT("cuMemcpyDtoHAsync");
    return end(queue_copy(stream, (Address)dst, src, size));
}

int cuMemcpyAsync(Address dst, Address src, size_t size, uint64_t stream) {
    CALL_IN_CONTEXT("cuMemcpyAsync");
    return end(queue_copy(stream, dst, src, size));
}

static int copy_now(Address dst, Address src, uint64_t size) {
    int result = drain(NULL, 1); /* streams that do not wait for the default one may still hold work */
    if (!result)
        result = queue_copy(0, dst, src, size);
    return result ? result : drain(stream_of(0), 0);
}

int cuMemcpyHtoD_v2(Address dst, const void *src, size_t size) {
    CALL_IN_CONTEXT("cuMemcpyHtoD");
    return end(copy_now(dst, (Address)src, size));
}

int cuMemcpyDtoH_v2(void *dst, Address src, size_t size) {
    CALL_IN_CONTEXT("cuMemcpyDtoH");
    return end(copy_now((Address)dst, src, size));
}

/* Copies in any order among each other; sources may be read before their turn where `order` lets them. */
static int queue_batch(Address *dst, Address *src, size_t *size, size_t count, CopyAttributes *given, size_t *first,
                       size_t given_count, uint64_t handle) {
    struct stream *stream = handle > 2 ? stream_of(handle) : NULL; /* not a default stream */
    if (!stream || !count || given_count != 1 || first[0] || given->order < 1 || given->order > 3 || given->flags > 1)
        return INVALID_VALUE;
    size_t *order = malloc(count * sizeof *order);
    for (size_t i = 0; i < count; i++) {
        size_t other = draw(i + 1);
        order[i] = order[other], order[other] = i;
    }
    int result = OK;
    for (size_t i = 0; i < count && !result; i++) { /* all or none */
        int is_dst_reached, is_src_reached;
        if (!size[i] || !reach(dst[i], size[i], stream->context, 0, &is_dst_reached) ||
            !reach(src[i], size[i], stream->context, 0, &is_src_reached))
            result = INVALID_VALUE;
        else if (!is_dst_reached || !is_src_reached)
            add_to("count", "pageable_copies", 1);
    }
    for (size_t i = 0; i < count && !result; i++) {
        size_t n = order[i];
        int is_reached;
        struct work work = {.what = COPY, .dst = dst[n], .src = src[n], .size = size[n]};
        if (given->order == DURING_CALL || (given->order == ANY_ORDER && draw(2))) {
            work.early = malloc(size[n]);
            memcpy(work.early, reach(src[n], size[n], stream->context, 0, &is_reached), size[n]);
        }
        put(stream, work);
    }
    free(order);
    add_to("count", "batch_copies", result ? 0 : (int64_t)count);
    add_to("count", given->order == 1 ? "batch_order_1" : given->order == 2 ? "batch_order_2" : "batch_order_3", 1);
    add_to("count", given->flags ? "batch_flags_1" : "batch_flags_0", 1);
    return result;
}

int batch_of_12(Address *dst, Address *src, size_t *size, size_t count, CopyAttributes *given, size_t *first,
                size_t given_count, size_t *failed, uint64_t stream) {
    CALL_IN_CONTEXT("cuMemcpyBatchAsync");
    *failed = SIZE_MAX;
    return end(queue_batch(dst, src, size, count, given, first, given_count, stream));
}

int batch_of_13(Address *dst, Address *src, size_t *size, size_t count, CopyAttributes *given, size_t *first,
                size_t given_count, uint64_t stream) {
    CALL_IN_CONTEXT("cuMemcpyBatchAsync");
    return end(queue_batch(dst, src, size, count, given, first, given_count, stream));
}

/* ---- kernels: every function is taken for the copy kernel */

int cuModuleLoadData(uint64_t *out, const void *image) {
    CALL_IN_CONTEXT("cuModuleLoadData");
    const unsigned char *elf = image;
    uint64_t sections;
    uint16_t size, count;
    if (!elf || memcmp(elf, "\177ELF", 4))
        return end(INVALID_IMAGE);
    memcpy(&sections, elf + 40, 8), memcpy(&size, elf + 58, 2), memcpy(&count, elf + 60, 2);
    struct module *made = calloc(1, sizeof *made);
    *made = (struct module){new_handle(), current()->handle, image, sections + size * count, modules};
    made->image = memcpy(malloc(made->size), image, made->size);
    modules = made;
    add_to("held", "modules", 1);
    *out = made->handle;
    return end(OK);
}

int cuModuleGetFunction(uint64_t *out, uint64_t handle, const char *name) {
    CALL_IN_CONTEXT("cuModuleGetFunction");
    struct module *module = modules;
    while (module && module->handle != handle)
        module = module->next;
    if (!module)
        return end(INVALID_HANDLE);
    if (!memmem(module->image, module->size, name, strlen(name)))
        return end(NOT_FOUND);
    struct function *made = calloc(1, sizeof *made);
    *made = (struct function){new_handle(), module, functions};
    functions = made;
    *out = made->handle;
    return end(OK);
}

int cuModuleUnload(uint64_t handle) {
    CALL_IN_CONTEXT("cuModuleUnload");
    struct module *module = modules;
    while (module && module->handle != handle)
        module = module->next;
    if (!module || !handle)
        return end(INVALID_HANDLE);
    module->handle = module->context = 0; /* its functions are refused from now on */
    add_to("held", "modules", -1);
    return end(OK);
}

int cuLaunchKernel(uint64_t handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, uint64_t stream_handle, void **parameters, void **extra) {
    CALL_IN_CONTEXT("cuLaunchKernel");
    struct function *function = functions;
    struct stream *stream = stream_of(stream_handle);
    while (function && function->handle != handle)
        function = function->next;
    if (!function || !function->module->handle || !stream)
        return end(INVALID_HANDLE);
    unsigned long threads = (unsigned long)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > 1024 || shared > 48 << 10 || extra)
        return end(INVALID_VALUE);
    Address table = *(Address *)parameters[0];
    int64_t count = *(int64_t *)parameters[1];
    add_to("count", "kernel_launches", 1);
    if (count > 0)
        put(stream, (struct work){.what = KERNEL, .src = table, .size = (uint64_t)count * ROW_BYTES});
    return end(OK);
}

/* ---- NVML, as much as tells the memory in use */

typedef struct { unsigned long long total, free, used; } NvmlMemory;
static int nvml_users;

static int enter_nvml(void) { /* reads the folder anew: this may be a library of its own */
    const char *where = getenv("FAKECUDA");
    if (!where)
        return 9; /* DRIVER_NOT_LOADED */
    snprintf(folder, sizeof folder, "%s", where);
    config_inode = 0;
    read_config();
    return 0;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int result = enter_nvml();
    nvml_users += !result;
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!nvml_users)
        return 1; /* UNINITIALIZED */
    nvml_users--;
    return 0;
}

const char *nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    char text[64];
    for (int gpu = 0; gpu < gpus && nvml_users; gpu++) {
        text_of(gpu, text);
        if (!strcmp(text, uuid)) {
            *out = (void *)(intptr_t)(gpu + 1);
            return 0;
        }
    }
    return nvml_users ? 6 : 1; /* NOT_FOUND, UNINITIALIZED */
}

int nvmlDeviceGetMemoryInfo(void *device, NvmlMemory *out) {
    if (!nvml_users)
        return 1;
    out->total = total_bytes;
    out->used = used_bytes((int)(intptr_t)device - 1);
    out->free = out->total - out->used;
    return 0;
}

/* ---- how the bindings find all this */

#define PLAIN(name) {#name, (void *)name}
#define AS(name, symbol) {#name, (void *)symbol}
static const struct { const char *name; void *address; } table[] = {
    PLAIN(cuInit), PLAIN(cuDriverGetVersion), PLAIN(cuGetErrorName), PLAIN(cuGetErrorString), PLAIN(cuDeviceGetCount),
    PLAIN(cuDeviceGet), PLAIN(cuDeviceGetName), AS(cuDeviceGetUuid, cuDeviceGetUuid_v2), PLAIN(cuDeviceGetAttribute),
    AS(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2), PLAIN(cuDevicePrimaryCtxGetState),
    PLAIN(cuDevicePrimaryCtxRetain), AS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2),
    AS(cuCtxPushCurrent, cuCtxPushCurrent_v2), AS(cuCtxPopCurrent, cuCtxPopCurrent_v2), PLAIN(cuCtxGetCurrent),
    PLAIN(cuCtxSetCurrent), PLAIN(cuCtxGetDevice), PLAIN(cuCtxSynchronize), AS(cuMemGetInfo, cuMemGetInfo_v2),
    AS(cuMemAlloc, cuMemAlloc_v2), AS(cuMemFree, cuMemFree_v2), PLAIN(cuMemHostAlloc), PLAIN(cuMemFreeHost),
    AS(cuMemHostRegister, cuMemHostRegister_v2), PLAIN(cuMemHostUnregister),
    AS(cuMemGetAddressRange, cuMemGetAddressRange_v2), PLAIN(cuPointerGetAttribute), PLAIN(cuIpcGetMemHandle),
    AS(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2), PLAIN(cuIpcCloseMemHandle), PLAIN(cuMemCreate), PLAIN(cuMemRelease),
    PLAIN(cuMemRetainAllocationHandle), PLAIN(cuMemExportToShareableHandle), PLAIN(cuMemImportFromShareableHandle),
    PLAIN(cuMemAddressReserve), PLAIN(cuMemAddressFree), PLAIN(cuMemMap), PLAIN(cuMemSetAccess), PLAIN(cuMemUnmap),
    PLAIN(cuStreamCreate), AS(cuStreamDestroy, cuStreamDestroy_v2), PLAIN(cuStreamSynchronize),
    AS(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2), AS(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2), PLAIN(cuMemcpyAsync),
    AS(cuMemcpyHtoD, cuMemcpyHtoD_v2), AS(cuMemcpyDtoH, cuMemcpyDtoH_v2), PLAIN(cuModuleLoadData),
    PLAIN(cuModuleGetFunction), PLAIN(cuModuleUnload), PLAIN(cuLaunchKernel),
};

int cuGetProcAddress_v2(const char *name, void **out, int wanted, uint64_t flags, int *status) {
    (void)flags;
    *out = NULL;
    int found_status = 1; /* SYMBOL_NOT_FOUND */
    if (!strcmp(name, "cuGetProcAddress"))
        *out = (void *)cuGetProcAddress_v2;
    if (!strcmp(name, "cuMemcpyBatchAsync") && version >= 12080) {
        *out = wanted >= 13000 ? (void *)batch_of_13 : wanted >= 12080 ? (void *)batch_of_12 : NULL;
        found_status = 2; /* VERSION_NOT_SUFFICIENT */
    }
    for (size_t i = 0; !*out && i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            *out = table[i].address;
    if (status)
        *status = *out ? 0 : found_status;
    return *out || status ? OK : NOT_FOUND;
}
