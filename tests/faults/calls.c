/* Stands before the calls of libc that write, rename, remove or make durable, and fails one of them, or all from one on.
 *
 * Loaded with LD_PRELOAD into every process of a run, so it sees what Python does and what libraries do (HDF5).
 * FAULT_CALLS names the control file, which all processes map: calls are counted there together, and what is to happen
 * to which files is read from it. support/injector.py makes it and reads it; `struct control` and `struct entry` are
 * its format.
 *
 * Nothing here allocates, locks or leaves errno changed where nothing is failed, so it may stand in threads, in forked
 * children and in signal handlers.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_PATH 4096
#define MAX_PROCESSES 256

enum action { COUNT, FAIL, SHORTEN, KILL, STOP, KILL_ALL };

/* When a call cannot fail for want of room, it does not while a full disk lasts; alone it fails with EIO instead. */
enum needs { NOTHING, ROOM, LOCK };

/* Whose calls count: the process's that created a file whose path has `path` in it, or of those that have not. */
enum who { ALL, MAKER, OTHERS };

struct control {
    uint64_t counted;   /* calls so far, of all processes */
    uint64_t begin;     /* which of them is harmed first, from 1; 0: none */
    int32_t action;     /* enum action */
    int32_t error;      /* for FAIL */
    int32_t is_lasting; /* also all that come after it */
    int32_t harmed;     /* calls that were harmed so far */
    uint64_t capacity;  /* entries that follow the first page */
    char names[512];    /* only these calls count: ",write,rename,"; nothing: all but those that only read */
    char path[512];     /* only files whose path has this in it */
    char folders[1024]; /* only files below these folders: absolute, between colons */
    int32_t who;        /* enum who */
    int32_t process_count;
    int32_t processes[MAX_PROCESSES]; /* that have loaded this, launchers too, or were forked from one that has */
};

struct entry {
    char name[24];
    int32_t pid;
    int32_t is_harmed;
    char path[224]; /* its end, where it is longer */
};

static struct control *control;
static struct entry *entries;
static int is_maker;

static size_t append_number(char *to, int number) {
    char digits[12];
    size_t count = 0, done = 0;
    do digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (count > 0) to[done++] = digits[--count];
    to[done] = 0;
    return done;
}

static void enroll(void) {
    int32_t number = __atomic_fetch_add(&control->process_count, 1, __ATOMIC_SEQ_CST);
    if (number < MAX_PROCESSES) control->processes[number] = (int32_t)syscall(SYS_getpid);
}

/* Return whether a process was started with this control file: its number may be another's by now. */
static int is_of_this_run(int32_t process) {
    static char environment[1 << 17];
    char name[40] = "/proc/";
    strcpy(name + 6 + append_number(name + 6, process), "/environ");
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY);
    size_t size = 0;
    for (long count; fd >= 0 && size < sizeof environment; size += (size_t)count)
        if ((count = syscall(SYS_read, fd, environment + size, sizeof environment - size)) <= 0) break;
    if (fd >= 0) syscall(SYS_close, fd);
    const char *own = getenv("FAULT_CALLS");
    return memmem(environment, size, own, strlen(own) + 1) != NULL;
}

static void kill_others(void) {
    int32_t own = (int32_t)syscall(SYS_getpid);
    for (int32_t number = 0; number < control->process_count && number < MAX_PROCESSES; number++) {
        int32_t process = control->processes[number];
        if (process > 0 && process != own && is_of_this_run(process)) syscall(SYS_kill, process, SIGKILL);
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_CALLS");
    if (path == NULL) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) return;
    void *mapped = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped == MAP_FAILED) return;
    entries = (struct entry *)((char *)mapped + 4096);
    control = mapped;
    enroll();
    pthread_atfork(NULL, NULL, enroll);
}

/* Return whether a path lies in one of the folders, or is one. */
static int is_watched(const char *path) {
    for (const char *folder = control->folders; *folder != 0;) {
        size_t length = strcspn(folder, ":");
        if (strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0)) return 1;
        folder += length + (folder[length] == ':');
    }
    return 0;
}

/* Put into `to` what the link `name` of /proc/self leads to; nothing where there is none. */
static void follow(const char *name, char *to) {
    long length = syscall(SYS_readlinkat, AT_FDCWD, name, to, MAX_PATH - 1);
    to[length > 0 ? length : 0] = 0;
}

static void path_of_descriptor(int fd, char *to) {
    char name[40] = "/proc/self/fd/";
    to[0] = 0;
    if (fd < 0) return;
    append_number(name + 14, fd);
    follow(name, to);
}

/* Put into `to` the absolute path that `path` is for a call that is given `folder` with it. */
static void path_of_name(int folder, const char *path, char *to) {
    to[0] = 0;
    if (path == NULL) return;
    if (strncmp(path, "/proc/self/fd/", 14) == 0) {
        path_of_descriptor(atoi(path + 14), to);
        return;
    }
    if (path[0] != '/') {
        if (folder == AT_FDCWD) follow("/proc/self/cwd", to);
        else path_of_descriptor(folder, to);
        if (path[0] != 0) strncat(to, "/", MAX_PATH - strlen(to) - 1);
    }
    strncat(to, path, MAX_PATH - strlen(to) - 1);
}

static int is_asked_for(const char *name, int only_reads) {
    if (control->names[0] == 0) return !only_reads;
    for (const char *at = control->names; (at = strstr(at, name)) != NULL; at += 1)
        if (at[-1] == ',' && at[strlen(name)] == ',') return 1;
    return 0;
}

static int error_for(enum needs needs) {
    int is_full = control->error == ENOSPC || control->error == EDQUOT;
    if (is_full && needs == LOCK) return ENOLCK;
    return is_full && needs == NOTHING ? EIO : control->error;
}

/* Count a call for the file at `path`, and do harm where it is its turn. Return what the call is to do. */
static enum action counted(const char *name, const char *path, enum needs needs, int only_reads, int *error) {
    if (!is_watched(path) || strstr(path, control->path) == NULL) return COUNT;
    if (strcmp(name, "create") == 0) is_maker = 1;
    if (!is_asked_for(name, only_reads)) return COUNT;
    if (control->who != ALL && is_maker != (control->who == MAKER)) return COUNT;
    uint64_t number = __atomic_add_fetch(&control->counted, 1, __ATOMIC_SEQ_CST);
    enum action action = control->action;
    int is_turn = number == control->begin || (control->is_lasting && control->begin != 0 && number > control->begin);
    if (control->is_lasting && action == FAIL && error_for(needs) != control->error) is_turn = 0;
    if (number <= control->capacity) {
        struct entry *entry = &entries[number - 1];
        size_t length = strlen(path), skipped = length < sizeof entry->path ? 0 : length - sizeof entry->path + 1;
        strcpy(entry->name, name);
        strcpy(entry->path, path + skipped);
        entry->is_harmed = is_turn && action != COUNT;
        entry->pid = (int32_t)syscall(SYS_getpid);
    }
    if (!is_turn || action == COUNT) return COUNT;
    __atomic_add_fetch(&control->harmed, 1, __ATOMIC_SEQ_CST);
    if (action == STOP) {
        syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
        return COUNT;
    }
    if (action == KILL || action == KILL_ALL) {
        if (action == KILL_ALL) kill_others();
        for (;;) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    }
    *error = error_for(needs);
    return action;
}

static enum action of_descriptor(const char *name, int fd, enum needs needs, int only_reads, int *error) {
    char path[MAX_PATH];
    if (control == NULL) return COUNT;
    int before = errno;
    path_of_descriptor(fd, path);
    enum action action = path[0] == '/' ? counted(name, path, needs, only_reads, error) : COUNT;
    errno = before;
    return action;
}

static enum action of_name(const char *name, int folder, const char *given, enum needs needs, int only_reads, int *error) {
    char path[MAX_PATH];
    if (control == NULL) return COUNT;
    int before = errno;
    path_of_name(folder, given, path);
    enum action action = counted(name, path, needs, only_reads, error);
    errno = before;
    return action;
}

/* One of two names is enough: the new one, unless only the old one is watched. */
static enum action of_names(const char *name, int from_folder, const char *from, int folder, const char *given,
                            int *error) {
    char path[MAX_PATH];
    if (control == NULL) return COUNT;
    int before = errno;
    path_of_name(folder, given, path);
    if (!is_watched(path)) path_of_name(from_folder, from, path);
    enum action action = counted(name, path, ROOM, 0, error);
    errno = before;
    return action;
}

#define NEXT(kind, name, ...)                                                            \
    static kind (*next)(__VA_ARGS__);                                                    \
    if (next == NULL) next = (kind(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

#define FAILED(happens, value) \
    if ((happens) == FAIL) {   \
        errno = error;         \
        return value;          \
    }

/* Less than was asked for, but more than nothing. */
#define LESS(happens, count) ((happens) == SHORTEN && (count) > 1 ? (count) / 2 : (count))

/* Calls that write to a descriptor. */

#define WRITE(name, counts_as, arguments, types, ...)                   \
    ssize_t name arguments {                                            \
        NEXT(ssize_t, name, types)                                      \
        int error = 0;                                                  \
        enum action happens = of_descriptor(#counts_as, fd, ROOM, 0, &error); \
        FAILED(happens, -1)                                             \
        return next(__VA_ARGS__);                                       \
    }
#define TYPES(...) __VA_ARGS__

WRITE(write, write, (int fd, const void *data, size_t count), TYPES(int, const void *, size_t), fd, data,
      LESS(happens, count))
WRITE(pwrite, pwrite, (int fd, const void *data, size_t count, off_t at), TYPES(int, const void *, size_t, off_t), fd,
      data, LESS(happens, count), at)
WRITE(pwrite64, pwrite, (int fd, const void *data, size_t count, off64_t at),
      TYPES(int, const void *, size_t, off64_t), fd, data, LESS(happens, count), at)

/* A vector is cut to half of its first part. */
#define VECTOR(name, counts_as, arguments, types, ...)                  \
    ssize_t name arguments {                                            \
        NEXT(ssize_t, name, types)                                      \
        int error = 0;                                                  \
        enum action happens = of_descriptor(#counts_as, fd, ROOM, 0, &error); \
        FAILED(happens, -1)                                             \
        struct iovec less = {0};                                        \
        if (happens == SHORTEN && count > 0) {                          \
            less = parts[0];                                            \
            less.iov_len = LESS(happens, less.iov_len);                 \
            parts = &less;                                              \
            count = 1;                                                  \
        }                                                               \
        return next(__VA_ARGS__);                                       \
    }

VECTOR(writev, writev, (int fd, const struct iovec *parts, int count), TYPES(int, const struct iovec *, int), fd, parts,
       count)
VECTOR(pwritev, pwritev, (int fd, const struct iovec *parts, int count, off_t at),
       TYPES(int, const struct iovec *, int, off_t), fd, parts, count, at)
VECTOR(pwritev64, pwritev, (int fd, const struct iovec *parts, int count, off64_t at),
       TYPES(int, const struct iovec *, int, off64_t), fd, parts, count, at)
VECTOR(pwritev2, pwritev, (int fd, const struct iovec *parts, int count, off_t at, int flags),
       TYPES(int, const struct iovec *, int, off_t, int), fd, parts, count, at, flags)
VECTOR(pwritev64v2, pwritev, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
       TYPES(int, const struct iovec *, int, off64_t, int), fd, parts, count, at, flags)

WRITE(copy_file_range, copy_file_range,
      (int source, off64_t *from, int fd, off64_t *to, size_t count, unsigned int flags),
      TYPES(int, off64_t *, int, off64_t *, size_t, unsigned int), source, from, fd, to, LESS(happens, count), flags)
WRITE(sendfile, sendfile, (int fd, int source, off_t *from, size_t count), TYPES(int, int, off_t *, size_t), fd, source,
      from, LESS(happens, count))
WRITE(sendfile64, sendfile, (int fd, int source, off64_t *from, size_t count), TYPES(int, int, off64_t *, size_t), fd,
      source, from, LESS(happens, count))
WRITE(splice, splice, (int source, off64_t *from, int fd, off64_t *to, size_t count, unsigned int flags),
      TYPES(int, off64_t *, int, off64_t *, size_t, unsigned int), source, from, fd, to, LESS(happens, count), flags)

/* Calls that read; they count only where they are asked for by name. */

#define READ(name, counts_as, arguments, types, ...)                    \
    ssize_t name arguments {                                            \
        NEXT(ssize_t, name, types)                                      \
        int error = 0;                                                  \
        enum action happens = of_descriptor(#counts_as, fd, NOTHING, 1, &error); \
        FAILED(happens, -1)                                             \
        return next(__VA_ARGS__);                                       \
    }

READ(read, read, (int fd, void *data, size_t count), TYPES(int, void *, size_t), fd, data, LESS(happens, count))
READ(pread, pread, (int fd, void *data, size_t count, off_t at), TYPES(int, void *, size_t, off_t), fd, data,
     LESS(happens, count), at)
READ(pread64, pread, (int fd, void *data, size_t count, off64_t at), TYPES(int, void *, size_t, off64_t), fd, data,
     LESS(happens, count), at)
READ(preadv, preadv, (int fd, const struct iovec *parts, int count, off_t at),
     TYPES(int, const struct iovec *, int, off_t), fd, parts, count, at)
READ(preadv64, preadv, (int fd, const struct iovec *parts, int count, off64_t at),
     TYPES(int, const struct iovec *, int, off64_t), fd, parts, count, at)
READ(preadv2, preadv, (int fd, const struct iovec *parts, int count, off_t at, int flags),
     TYPES(int, const struct iovec *, int, off_t, int), fd, parts, count, at, flags)
READ(preadv64v2, preadv, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
     TYPES(int, const struct iovec *, int, off64_t, int), fd, parts, count, at, flags)

#define MAP(name)                                                                            \
    void *name(void *place, size_t length, int protection, int flags, int fd, off_t at) {    \
        NEXT(void *, name, void *, size_t, int, int, int, off_t)                             \
        int error = 0;                                                                       \
        enum action happens = fd < 0 ? COUNT : of_descriptor("mmap", fd, NOTHING, 1, &error); \
        FAILED(happens, MAP_FAILED)                                                          \
        return next(place, length, protection, flags, fd, at);                               \
    }
MAP(mmap)
MAP(mmap64)

/* Calls that change or sync the file of a descriptor. */

#define CHANGE(name, counts_as, needs, arguments, types, ...)           \
    int name arguments {                                                \
        NEXT(int, name, types)                                          \
        int error = 0;                                                  \
        enum action happens = of_descriptor(#counts_as, fd, needs, 0, &error); \
        FAILED(happens, -1)                                             \
        return next(__VA_ARGS__);                                       \
    }

CHANGE(ftruncate, ftruncate, ROOM, (int fd, off_t size), TYPES(int, off_t), fd, size)
CHANGE(ftruncate64, ftruncate, ROOM, (int fd, off64_t size), TYPES(int, off64_t), fd, size)
CHANGE(fallocate, fallocate, ROOM, (int fd, int mode, off_t at, off_t count), TYPES(int, int, off_t, off_t), fd, mode, at,
       count)
CHANGE(fallocate64, fallocate, ROOM, (int fd, int mode, off64_t at, off64_t count), TYPES(int, int, off64_t, off64_t),
       fd, mode, at, count)
CHANGE(fsync, fsync, ROOM, (int fd), TYPES(int), fd)
CHANGE(fdatasync, fdatasync, ROOM, (int fd), TYPES(int), fd)
CHANGE(syncfs, syncfs, ROOM, (int fd), TYPES(int), fd)
CHANGE(sync_file_range, sync_file_range, ROOM, (int fd, off64_t at, off64_t count, unsigned int flags),
       TYPES(int, off64_t, off64_t, unsigned int), fd, at, count, flags)
CHANGE(fchmod, fchmod, NOTHING, (int fd, mode_t mode), TYPES(int, mode_t), fd, mode)
CHANGE(fchown, fchown, NOTHING, (int fd, uid_t user, gid_t group), TYPES(int, uid_t, gid_t), fd, user, group)
CHANGE(futimens, futimens, NOTHING, (int fd, const struct timespec times[2]), TYPES(int, const struct timespec *), fd,
       times)

/* These return the error and leave errno alone. */
#define ALLOCATE(name, offset)                                                   \
    int name(int fd, offset at, offset count) {                                  \
        NEXT(int, name, int, offset, offset)                                     \
        int error = 0;                                                           \
        if (of_descriptor("posix_fallocate", fd, ROOM, 0, &error) == FAIL) return error; \
        return next(fd, at, count);                                              \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int flock(int fd, int kind) {
    NEXT(int, flock, int, int)
    int error = 0;
    enum action happens = (kind & LOCK_UN) != 0 ? COUNT : of_descriptor("flock", fd, LOCK, 0, &error);
    FAILED(happens, -1)
    return next(fd, kind);
}

int ioctl(int fd, unsigned long request, ...) {
    NEXT(int, ioctl, int, unsigned long, ...)
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int error = 0, is_clone = request == FICLONE || request == FICLONERANGE;
    enum action happens = is_clone ? of_descriptor("ioctl_clone", fd, ROOM, 0, &error) : COUNT;
    FAILED(happens, -1)
    return next(fd, request, argument);
}

/* Whatever it says, the descriptor is closed. Where nothing can have been written, that is no call that writes. */
int close(int fd) {
    NEXT(int, close, int)
    int error = 0, before = errno;
    int flags = control == NULL ? -1 : fcntl(fd, F_GETFL);
    errno = before;
    enum action happens = COUNT;
    if (flags != -1) {
        struct stat status;
        int only_reads = (flags & O_ACCMODE) == O_RDONLY, is_empty = fstat(fd, &status) != 0 || status.st_size == 0;
        enum needs needs = only_reads || is_empty ? NOTHING : ROOM;
        happens = of_descriptor(only_reads ? "close_reader" : "close", fd, needs, only_reads, &error);
    }
    int result = next(fd);
    FAILED(happens, -1)
    return result;
}

/* Calls that open a file: those that may create one count as "create". */

static int creates(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

static enum action opening(int folder, const char *path, int flags, int *error) {
    if (creates(flags)) return of_name("create", folder, path, ROOM, 0, error);
    return of_name("open", folder, path, NOTHING, 1, error);
}

#define OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                         \
        NEXT(int, name, const char *, int, ...)                          \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode_t mode = creates(flags) ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                    \
        int error = 0;                                                   \
        enum action happens = opening(AT_FDCWD, path, flags, &error);    \
        FAILED(happens, -1)                                              \
        return next(path, flags, mode);                                  \
    }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name)                                                    \
    int name(int folder, const char *path, int flags, ...) {             \
        NEXT(int, name, int, const char *, int, ...)                     \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode_t mode = creates(flags) ? va_arg(rest, mode_t) : 0;         \
        va_end(rest);                                                    \
        int error = 0;                                                   \
        enum action happens = opening(folder, path, flags, &error);      \
        FAILED(happens, -1)                                              \
        return next(folder, path, flags, mode);                          \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define OPEN_CHECKED(name)                                               \
    int name(const char *path, int flags) {                              \
        NEXT(int, name, const char *, int)                               \
        int error = 0;                                                   \
        enum action happens = opening(AT_FDCWD, path, flags, &error);    \
        FAILED(happens, -1)                                              \
        return next(path, flags);                                        \
    }
OPEN_CHECKED(__open_2)
OPEN_CHECKED(__open64_2)

#define OPEN_AT_CHECKED(name)                                            \
    int name(int folder, const char *path, int flags) {                  \
        NEXT(int, name, int, const char *, int)                          \
        int error = 0;                                                   \
        enum action happens = opening(folder, path, flags, &error);      \
        FAILED(happens, -1)                                              \
        return next(folder, path, flags);                                \
    }
OPEN_AT_CHECKED(__openat_2)
OPEN_AT_CHECKED(__openat64_2)

#define CREATE(name)                                                     \
    int name(const char *path, mode_t mode) {                            \
        NEXT(int, name, const char *, mode_t)                            \
        int error = 0;                                                   \
        enum action happens = of_name("create", AT_FDCWD, path, ROOM, 0, &error); \
        FAILED(happens, -1)                                              \
        return next(path, mode);                                         \
    }
CREATE(creat)
CREATE(creat64)

/* Calls by name. */

#define NAMED(name, counts_as, needs, folder, arguments, types, ...)     \
    int name arguments {                                                 \
        NEXT(int, name, types)                                           \
        int error = 0;                                                   \
        enum action happens = of_name(#counts_as, folder, path, needs, 0, &error); \
        FAILED(happens, -1)                                              \
        return next(__VA_ARGS__);                                        \
    }

NAMED(truncate, truncate, ROOM, AT_FDCWD, (const char *path, off_t size), TYPES(const char *, off_t), path, size)
NAMED(truncate64, truncate, ROOM, AT_FDCWD, (const char *path, off64_t size), TYPES(const char *, off64_t), path, size)
NAMED(mkdir, mkdir, ROOM, AT_FDCWD, (const char *path, mode_t mode), TYPES(const char *, mode_t), path, mode)
NAMED(mkdirat, mkdir, ROOM, folder, (int folder, const char *path, mode_t mode), TYPES(int, const char *, mode_t),
      folder, path, mode)
NAMED(rmdir, rmdir, NOTHING, AT_FDCWD, (const char *path), TYPES(const char *), path)
NAMED(unlink, unlink, NOTHING, AT_FDCWD, (const char *path), TYPES(const char *), path)
NAMED(unlinkat, unlink, NOTHING, folder, (int folder, const char *path, int flags), TYPES(int, const char *, int),
      folder, path, flags)
NAMED(remove, unlink, NOTHING, AT_FDCWD, (const char *path), TYPES(const char *), path)
NAMED(chmod, chmod, NOTHING, AT_FDCWD, (const char *path, mode_t mode), TYPES(const char *, mode_t), path, mode)
NAMED(fchmodat, chmod, NOTHING, folder, (int folder, const char *path, mode_t mode, int flags),
      TYPES(int, const char *, mode_t, int), folder, path, mode, flags)
NAMED(utimensat, utimensat, NOTHING, folder, (int folder, const char *path, const struct timespec times[2], int flags),
      TYPES(int, const char *, const struct timespec *, int), folder, path, times, flags)
NAMED(symlink, symlink, ROOM, AT_FDCWD, (const char *to, const char *path), TYPES(const char *, const char *), to, path)
NAMED(symlinkat, symlink, ROOM, folder, (const char *to, int folder, const char *path),
      TYPES(const char *, int, const char *), to, folder, path)

#define RENAMED(name, counts_as, from_folder, to_folder, arguments, types, ...)  \
    int name arguments {                                                         \
        NEXT(int, name, types)                                                   \
        int error = 0;                                                           \
        enum action happens = of_names(#counts_as, from_folder, from, to_folder, to, &error); \
        FAILED(happens, -1)                                                      \
        return next(__VA_ARGS__);                                                \
    }

RENAMED(rename, rename, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), TYPES(const char *, const char *), from,
        to)
RENAMED(renameat, rename, old, new, (int old, const char *from, int new, const char *to),
        TYPES(int, const char *, int, const char *), old, from, new, to)
RENAMED(renameat2, rename, old, new, (int old, const char *from, int new, const char *to, unsigned int flags),
        TYPES(int, const char *, int, const char *, unsigned int), old, from, new, to, flags)
RENAMED(link, link, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), TYPES(const char *, const char *), from, to)
RENAMED(linkat, link, old, new, (int old, const char *from, int new, const char *to, int flags),
        TYPES(int, const char *, int, const char *, int), old, from, new, to, flags)
