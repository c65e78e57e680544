/* Loses what was not synced.
 *
 * Preloaded into a process (LD_PRELOAD), this keeps every write to the files below one directory in memory until that
 * file is fsynced or fdatasynced. The process reads what it wrote; the disk does not have it. So SIGKILL does to the
 * process's files what a power cut does: it takes all that was written since the last sync. Without this, a kill loses
 * nothing, because the kernel holds the writes, and a missing sync is never noticed.
 *
 *   UNSYNCED_DIR      the directory, which has to exist; files in it and below are kept back. Not set: nothing is.
 *   UNSYNCED_IGNORE   1: syncs do nothing. A test that does not fail then cannot notice a missing sync either.
 *   UNSYNCED_FULL     names a file; while it exists, writes fail with ENOSPC: the disk is full.
 *   UNSYNCED_BROKEN   names a file; while it exists, syncs fail with EIO, and what they were to write never reaches the
 *                     disk unless it is written again, although the process goes on reading it: what kernels do.
 *   UNSYNCED_LEAK     of a thousand writes, how many reach the disk early (default 0): the kernel may write back
 *                     anything at any time, in any order.
 *   UNSYNCED_DELAY_MS how long each sync of these files takes longer (default 0).
 *
 * What it leaves alone: names that end in -shm (shared memory, which a power cut empties anyway; it is a mapped file) and
 * `lock`; directory entries (a file that was created, renamed or removed is so at once); mappings of files with
 * unsynced writes, which are refused. At a normal exit everything is written, as the kernel would do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK 4096
#define FDS 65536
#define BUCKETS 4096

struct block {
    off_t number;
    unsigned char bytes[BLOCK];
    int lost;            /* a sync failed: later ones pass it over */
    struct block *next;
};

/* One file, however often it is open. */
struct file {
    dev_t dev;
    ino_t ino;
    int fd;              /* ours; never closed, because that would end the process's locks on the file */
    off_t size;          /* as the process sees it */
    off_t cut;           /* bytes of the disk from here on were truncated away */
    int dirty;
    struct block *blocks[BUCKETS];
    struct file *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct file *files;
static struct file *by_fd[FDS];
static unsigned char append[FDS], synced[FDS];
static char dir[PATH_MAX];
static int ignore_syncs, leak_permille, delay_ms;
static const char *full, *broken;
static uint64_t dice;

static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_read)(int, void *, size_t);
static ssize_t (*real_pread)(int, void *, size_t, off_t);
static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_readv)(int, const struct iovec *, int);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static off_t (*real_lseek)(int, off_t, int);
static int (*real_ftruncate)(int, off_t);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_fstat)(int, struct stat *);
static int (*real_stat)(const char *, struct stat *);
static int (*real_lstat)(const char *, struct stat *);
static int (*real_fstatat)(int, const char *, struct stat *, int);
static int (*real_statx)(int, const char *, int, unsigned, struct statx *);
static int (*real_unlink)(const char *);
static int (*real_unlinkat)(int, const char *, int);
static int (*real_rename)(const char *, const char *);
static int (*real_fallocate)(int, int, off_t, off_t);
static void *(*real_mmap)(void *, size_t, int, int, int, off_t);
static int (*real_fcntl)(int, int, ...);
static int (*real_dup)(int);

__attribute__((constructor)) static void begin(void) {
    if (real_open) return;
#define REAL(name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name)
#define REAL64(name) if (!(*(void **)&real_##name = dlsym(RTLD_NEXT, #name "64"))) REAL(name)
    REAL64(openat); REAL(close); REAL(read); REAL64(pread); REAL(write); REAL64(pwrite); REAL(readv); REAL(writev);
    REAL64(lseek); REAL64(ftruncate); REAL(fsync); REAL(fdatasync); REAL64(fstat); REAL64(stat); REAL64(lstat);
    REAL64(fstatat); REAL(statx); REAL(unlink); REAL(unlinkat); REAL(rename); REAL64(fallocate); REAL64(mmap);
    REAL64(fcntl); REAL(dup); REAL64(open);
    const char *text = getenv("UNSYNCED_DIR");
    if (!text || !realpath(text, dir)) dir[0] = 0;
    text = getenv("UNSYNCED_IGNORE");
    ignore_syncs = text && atoi(text);
    full = getenv("UNSYNCED_FULL");
    broken = getenv("UNSYNCED_BROKEN");
    text = getenv("UNSYNCED_LEAK");
    leak_permille = text ? atoi(text) : 0;
    text = getenv("UNSYNCED_DELAY_MS");
    delay_ms = text ? atoi(text) : 0;
    dice = (uint64_t)getpid() * 0x9e3779b97f4a7c15u | 1;
}

static int ends_in(const char *text, const char *end) {
    size_t a = strlen(text), b = strlen(end);
    return a >= b && !strcmp(text + a - b, end);
}

/* Whether the open file lies below the directory and is one of those that are kept back. */
static int is_ours(int fd) {
    char link[64], path[PATH_MAX];
    size_t length = strlen(dir);
    if (!length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    if (strncmp(path, dir, length) || path[length] != '/') return 0;
    return !ends_in(path, "-shm") && !ends_in(path, "/lock");
}

static struct file *of_fd(int fd) { return fd >= 0 && fd < FDS ? by_fd[fd] : NULL; }

static struct file *of_stat(const struct stat *st) {
    struct file *f = files;
    while (f && (f->dev != st->st_dev || f->ino != st->st_ino)) f = f->next;
    return f;
}

static struct block *block_of(struct file *f, off_t number) {
    struct block *b = f->blocks[number % BUCKETS];
    while (b && b->number != number) b = b->next;
    return b;
}

/* What the disk has, as far as it was not truncated away; zeros beyond. */
static void from_disk(struct file *f, unsigned char *to, size_t n, off_t at) {
    memset(to, 0, n);
    if (at >= f->cut) return;
    if ((off_t)n > f->cut - at) n = f->cut - at;
    while (n) {
        ssize_t got = real_pread(f->fd, to, n, at);
        if (got <= 0) return;
        to += got; at += got; n -= got;
    }
}

static struct block *block_for_write(struct file *f, off_t number) {
    struct block *b = block_of(f, number);
    if (b) return b;
    b = malloc(sizeof *b);
    if (!b) abort();
    b->number = number;
    b->lost = 0;
    from_disk(f, b->bytes, BLOCK, number * BLOCK);
    b->next = f->blocks[number % BUCKETS];
    f->blocks[number % BUCKETS] = b;
    return b;
}

static ssize_t file_read(struct file *f, void *to, size_t n, off_t at) {
    if (at >= f->size) return 0;
    if ((off_t)n > f->size - at) n = f->size - at;
    unsigned char *out = to;
    for (size_t done = 0; done < n;) {
        size_t within = (at + done) % BLOCK;
        size_t part = BLOCK - within < n - done ? BLOCK - within : n - done;
        struct block *b = block_of(f, (at + done) / BLOCK);
        if (b) memcpy(out + done, b->bytes + within, part);
        else from_disk(f, out + done, part, at + done);
        done += part;
    }
    return n;
}

static void write_back(struct file *f, struct block *b) {
    off_t at = b->number * BLOCK;
    size_t n = f->size - at < BLOCK ? (size_t)(f->size - at) : BLOCK;
    if (at < f->size && real_pwrite(f->fd, b->bytes, n, at) < 0) abort();
}

static ssize_t file_write(struct file *f, const void *from, size_t n, off_t at) {
    const unsigned char *in = from;
    if (at + (off_t)n > f->size) f->size = at + n;
    for (size_t done = 0; done < n;) {
        size_t within = (at + done) % BLOCK;
        size_t part = BLOCK - within < n - done ? BLOCK - within : n - done;
        struct block *b = block_for_write(f, (at + done) / BLOCK);
        memcpy(b->bytes + within, in + done, part);
        b->lost = 0;
        done += part;
        dice ^= dice << 13; dice ^= dice >> 7; dice ^= dice << 17;
        if (f->cut == INT64_MAX && (int)((dice >> 11) % 1000) < leak_permille) write_back(f, b);
    }
    f->dirty = 1;
    return n;
}

static void file_truncate(struct file *f, off_t size) {
    for (int i = 0; i < BUCKETS; i++)
        for (struct block **p = &f->blocks[i]; *p;) {
            struct block *b = *p;
            off_t at = b->number * BLOCK;
            if (at >= size) { *p = b->next; free(b); continue; }
            if (at + BLOCK > size) memset(b->bytes + (size - at), 0, BLOCK - (size - at));
            p = &b->next;
        }
    if (size < f->size && size < f->cut) f->cut = size;
    f->size = size;
    f->dirty = 1;
}

static void flush(struct file *f) {
    if (!f->dirty) return;
    struct stat st;
    if (real_fstat(f->fd, &st)) abort();
    if (f->cut < st.st_size && real_ftruncate(f->fd, f->cut)) abort();
    f->cut = INT64_MAX;
    for (int i = 0; i < BUCKETS; i++)
        for (struct block **p = &f->blocks[i]; *p;) {
            struct block *b = *p;
            if (b->lost) { p = &b->next; continue; }
            write_back(f, b);
            *p = b->next;
            free(b);
        }
    if (real_fstat(f->fd, &st)) abort();
    if (st.st_size != f->size && real_ftruncate(f->fd, f->size)) abort();
    f->dirty = 0;
}

__attribute__((destructor)) static void end(void) {
    pthread_mutex_lock(&lock);
    for (struct file *f = files; f; f = f->next) flush(f);
    pthread_mutex_unlock(&lock);
}

static void forget_file(const struct stat *st) {
    for (struct file **p = &files; *p; p = &(*p)->next)
        if ((*p)->dev == st->st_dev && (*p)->ino == st->st_ino) { *p = (*p)->next; return; }
}

static int opened(int fd, int flags) {
    struct stat st;
    int keep = errno;
    if (fd < 0 || fd >= FDS) return fd;
    if (is_ours(fd) && !real_fstat(fd, &st) && S_ISREG(st.st_mode)) {
        pthread_mutex_lock(&lock);
        struct file *f = of_stat(&st);
        if (!f) {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            int own = real_open(link, O_RDWR | O_CLOEXEC);
            /* What cannot be written needs nothing kept back. */
            if (own >= 0 && (f = calloc(1, sizeof *f))) {
                *f = (struct file){.dev = st.st_dev, .ino = st.st_ino, .fd = own, .size = st.st_size, .cut = INT64_MAX};
                f->next = files;
                files = f;
            }
        }
        if (f && (flags & O_TRUNC) && (flags & O_ACCMODE) != O_RDONLY) file_truncate(f, 0);
        by_fd[fd] = f;
        append[fd] = !!(flags & O_APPEND);
        synced[fd] = !!(flags & (O_SYNC | O_DSYNC));
        pthread_mutex_unlock(&lock);
    }
    errno = keep;
    return fd;
}

/* O_TRUNC is carried out in memory for our files; for others it is put back. */
static int open_any(int at, const char *path, int flags, mode_t mode) {
    begin();
    if (!dir[0] || !(flags & O_TRUNC) || (flags & O_TMPFILE) == O_TMPFILE)
        return opened(real_openat(at, path, flags, mode), flags);
    int fd = real_openat(at, path, flags & ~O_TRUNC, mode);
    if (fd >= 0 && !is_ours(fd) && (flags & O_ACCMODE) != O_RDONLY) {
        struct stat st;
        if (!real_fstat(fd, &st) && S_ISREG(st.st_mode) && real_ftruncate(fd, 0)) { real_close(fd); return -1; }
    }
    return opened(fd, flags);
}

#define MODE(flags, mode) \
    mode_t mode = 0; \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); \
    }

int open(const char *path, int flags, ...) { MODE(flags, mode) return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, mode) return open_any(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, mode) return open_any(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, mode) return open_any(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
    begin();
    if (of_fd(fd)) {
        pthread_mutex_lock(&lock);
        by_fd[fd] = NULL;
        pthread_mutex_unlock(&lock);
    }
    return real_close(fd);
}

static int copied(int from, int to) {
    if (to >= 0 && to < FDS && of_fd(from)) {
        pthread_mutex_lock(&lock);
        by_fd[to] = by_fd[from];
        append[to] = append[from];
        synced[to] = synced[from];
        pthread_mutex_unlock(&lock);
    }
    return to;
}

int dup(int fd) { begin(); return copied(fd, real_dup(fd)); }

static int fcntl_any(int fd, int command, void *argument) {
    begin();
    int result = real_fcntl(fd, command, argument);
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(fd, result) : result;
}

#define ARGUMENT(command, argument) \
    va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list);

int fcntl(int fd, int command, ...) { ARGUMENT(command, argument) return fcntl_any(fd, command, argument); }
int fcntl64(int fd, int command, ...) { ARGUMENT(command, argument) return fcntl_any(fd, command, argument); }

static ssize_t read_at(struct file *f, void *to, size_t n, off_t at) {
    pthread_mutex_lock(&lock);
    ssize_t done = file_read(f, to, n, at);
    pthread_mutex_unlock(&lock);
    return done;
}

static ssize_t write_at(int fd, struct file *f, const void *from, size_t n, off_t at) {
    if (full && !access(full, F_OK)) { errno = ENOSPC; return -1; }
    pthread_mutex_lock(&lock);
    ssize_t done = file_write(f, from, n, at);
    if (synced[fd] && !ignore_syncs) flush(f);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t pread(int fd, void *to, size_t n, off_t at) {
    begin();
    struct file *f = of_fd(fd);
    return f ? read_at(f, to, n, at) : real_pread(fd, to, n, at);
}
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return pread(fd, to, n, at); }

ssize_t pwrite(int fd, const void *from, size_t n, off_t at) {
    begin();
    struct file *f = of_fd(fd);
    return f ? write_at(fd, f, from, n, at) : real_pwrite(fd, from, n, at);
}
ssize_t pwrite64(int fd, const void *from, size_t n, off_t at) { return pwrite(fd, from, n, at); }

ssize_t read(int fd, void *to, size_t n) {
    begin();
    struct file *f = of_fd(fd);
    if (!f) return real_read(fd, to, n);
    off_t at = real_lseek(fd, 0, SEEK_CUR);
    ssize_t done = read_at(f, to, n, at);
    real_lseek(fd, at + done, SEEK_SET);
    return done;
}

ssize_t write(int fd, const void *from, size_t n) {
    begin();
    struct file *f = of_fd(fd);
    if (!f) return real_write(fd, from, n);
    off_t at = append[fd] ? f->size : real_lseek(fd, 0, SEEK_CUR);
    ssize_t done = write_at(fd, f, from, n, at);
    if (done < 0) return done;
    real_lseek(fd, at + done, SEEK_SET);
    return done;
}

ssize_t readv(int fd, const struct iovec *parts, int count) {
    begin();
    if (!of_fd(fd)) return real_readv(fd, parts, count);
    ssize_t done = 0;
    for (int i = 0; i < count; i++) {
        ssize_t got = read(fd, parts[i].iov_base, parts[i].iov_len);
        done += got;
        if (got < (ssize_t)parts[i].iov_len) break;
    }
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    begin();
    if (!of_fd(fd)) return real_writev(fd, parts, count);
    ssize_t done = 0;
    for (int i = 0; i < count; i++) {
        ssize_t n = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (n < 0) return done ? done : n;
        done += n;
    }
    return done;
}

off_t lseek(int fd, off_t offset, int whence) {
    begin();
    struct file *f = of_fd(fd);
    if (!f || whence != SEEK_END) return real_lseek(fd, offset, whence);
    return real_lseek(fd, f->size + offset, SEEK_SET);
}
off_t lseek64(int fd, off_t offset, int whence) { return lseek(fd, offset, whence); }

int ftruncate(int fd, off_t size) {
    begin();
    struct file *f = of_fd(fd);
    if (!f) return real_ftruncate(fd, size);
    pthread_mutex_lock(&lock);
    file_truncate(f, size);
    pthread_mutex_unlock(&lock);
    return 0;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t offset, off_t length) {
    begin();
    struct file *f = of_fd(fd);
    if (!f) return real_fallocate(fd, mode, offset, length);
    if (mode) { errno = EOPNOTSUPP; return -1; }
    if (offset + length > f->size) return ftruncate(fd, offset + length);
    return 0;
}
int fallocate64(int fd, int mode, off_t offset, off_t length) { return fallocate(fd, mode, offset, length); }
int posix_fallocate(int fd, off_t offset, off_t length) { return fallocate(fd, 0, offset, length) ? errno : 0; }
int posix_fallocate64(int fd, off_t offset, off_t length) { return posix_fallocate(fd, offset, length); }

static int sync_fd(int fd, int (*real)(int)) {
    struct file *f = of_fd(fd);
    if (!f) return real(fd);
    if (delay_ms > 0) usleep((useconds_t)delay_ms * 1000);
    if (ignore_syncs) return 0;
    int fails = broken && !access(broken, F_OK);
    pthread_mutex_lock(&lock);
    if (fails)
        for (int i = 0; i < BUCKETS; i++)
            for (struct block *b = f->blocks[i]; b; b = b->next) b->lost = 1;
    else
        flush(f);
    pthread_mutex_unlock(&lock);
    if (fails) { errno = EIO; return -1; }
    /* The kernel has it, and the kernel survives the kill. */
    return 0;
}

int fsync(int fd) { begin(); return sync_fd(fd, real_fsync); }
int fdatasync(int fd) { begin(); return sync_fd(fd, real_fdatasync); }

static int seen(int result, struct stat *st) {
    if (!result) {
        pthread_mutex_lock(&lock);
        struct file *f = of_stat(st);
        if (f) st->st_size = f->size;
        pthread_mutex_unlock(&lock);
    }
    return result;
}

int fstat(int fd, struct stat *st) { begin(); return seen(real_fstat(fd, st), st); }
int fstat64(int fd, struct stat64 *st) { return fstat(fd, (struct stat *)st); }
int stat(const char *path, struct stat *st) { begin(); return seen(real_stat(path, st), st); }
int stat64(const char *path, struct stat64 *st) { return stat(path, (struct stat *)st); }
int lstat(const char *path, struct stat *st) { begin(); return seen(real_lstat(path, st), st); }
int lstat64(const char *path, struct stat64 *st) { return lstat(path, (struct stat *)st); }
int fstatat(int at, const char *path, struct stat *st, int flags) {
    begin();
    return seen(real_fstatat(at, path, st, flags), st);
}
int fstatat64(int at, const char *path, struct stat64 *st, int flags) {
    return fstatat(at, path, (struct stat *)st, flags);
}
int statx(int at, const char *path, int flags, unsigned mask, struct statx *st) {
    begin();
    int result = real_statx(at, path, flags, mask | STATX_INO | STATX_SIZE, st);
    if (!result) {
        struct stat plain = {.st_dev = makedev(st->stx_dev_major, st->stx_dev_minor), .st_ino = st->stx_ino};
        plain.st_size = st->stx_size;
        seen(0, &plain);
        st->stx_size = plain.st_size;
    }
    return result;
}

/* A file that has lost its name keeps its contents for those that have it open, and is no longer found. */
static void unnamed(const struct stat *st, int found) {
    if (!found) return;
    pthread_mutex_lock(&lock);
    forget_file(st);
    pthread_mutex_unlock(&lock);
}

int unlink(const char *path) {
    begin();
    struct stat st;
    int found = !real_lstat(path, &st) && st.st_nlink == 1, result = real_unlink(path);
    unnamed(&st, found && !result);
    return result;
}

int unlinkat(int at, const char *path, int flags) {
    begin();
    struct stat st;
    int found = !real_fstatat(at, path, &st, AT_SYMLINK_NOFOLLOW) && st.st_nlink == 1;
    int result = real_unlinkat(at, path, flags);
    unnamed(&st, found && !result);
    return result;
}

int rename(const char *from, const char *to) {
    begin();
    struct stat old, new;
    int found = !real_lstat(to, &old) && old.st_nlink == 1 && !real_lstat(from, &new) && old.st_ino != new.st_ino;
    int result = real_rename(from, to);
    unnamed(&old, found && !result);
    return result;
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    begin();
    if (of_fd(fd)) { errno = ENODEV; return MAP_FAILED; }
    return real_mmap(address, length, protection, flags, fd, offset);
}
void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap(address, length, protection, flags, fd, offset);
}
