/* Keeps the person's files apart from a program whose weights are made up.
 *
 * Preloaded into every process of a program (with start.c), it stands before the C library's
 * functions that take paths. $TUNER_FILES names a folder with two trees, in which a file has its
 * whole path: `new` holds what was written, `gone` marks what was deleted. A path is looked up as
 * in a union of both with the real files: a mark hides a real file and all below it; what is in
 * `new` comes first. What is opened to be written, or changed, is copied to `new` before. So the
 * program finds its files where it wrote them, and nothing outside of the folder changes, except
 * in the folders of $TUNER_FILES_KEPT (caches, /dev, /proc, ...; one on each line).
 *
 * Raw system calls that change files (of Rust's rustix, of the C library's own insides) are trapped
 * by a seccomp filter and answered here. Static programs, which have nobody to answer, die of that,
 * which whoever waits for them is told in words, and Landlock, where the kernel has it, lets none of
 * them write elsewhere. Raw calls that read are not trapped: a new program's loader makes them before
 * anybody can answer.
 *
 * Real files are reached by system calls, never by the C library's own functions: other libraries
 * call these functions before anything is set up. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <utime.h>

#define EXPORT __attribute__((visibility("default")))
#define MARK "/\1gone"
#define LINKS 40
/* The sixth argument of this library's own system calls, which have fewer: they are let through. */
#define OWN 0x7e5d3c2b1a4f6e81L

static char root[PATH_MAX]; /* empty: this layer is off */
static char kept[16384];    /* paths, each ended by a zero; the last by two */
static volatile int *changed; /* shared by all processes: something was written or deleted */

/* -- system calls ------------------------------------------------------------------------------ */

static long sys_open(const char *path, int flags, mode_t mode) {
  return syscall(SYS_openat, AT_FDCWD, path, flags, mode, 0L, OWN);
}
static long sys_stat(const char *path, struct stat *st, int follow) {
  return syscall(SYS_newfstatat, AT_FDCWD, path, st, follow ? 0 : AT_SYMLINK_NOFOLLOW);
}
static long sys_readlink(const char *path, char *to, size_t size) {
  return syscall(SYS_readlinkat, AT_FDCWD, path, to, size);
}
static long sys_unlink(const char *path, int flags) {
  return syscall(SYS_unlinkat, AT_FDCWD, path, flags, 0L, 0L, OWN);
}
static long sys_mkdir(const char *path, mode_t mode) {
  return syscall(SYS_mkdirat, AT_FDCWD, path, mode, 0L, 0L, OWN);
}
static int there(const char *path) {
  struct stat st;
  return sys_stat(path, &st, 0) == 0;
}

/* -- start ------------------------------------------------------------------------------------- */

static int fail(int error) {
  errno = error;
  return -1;
}

static int within(const char *path, const char *folder) {
  size_t length = strlen(folder);
  return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_kept(const char *path) {
  for (const char *one = kept; *one; one += strlen(one) + 1)
    if (within(path, one)) return 1;
  return 0;
}

/* Structures of linux/landlock.h, which older headers lack. */
struct rules { uint64_t files; };
struct below { uint64_t allowed; int32_t folder; } __attribute__((packed));
#define WRITE_FILE (1ull << 1)
#define REMOVE_DIR_TO_MAKE_SYM (((1ull << 13) - 1) & ~((1ull << 4) - 1)) /* bits 4 to 12 */
#define REFER (1ull << 13)
#define TRUNCATE (1ull << 14)

/* Let this process and all that it starts write in the folder and in the kept ones only. */
static int hold(void) {
  long abi = syscall(444, NULL, 0, 1);
  if (abi < 1) return 0;
  struct rules rules = {WRITE_FILE | REMOVE_DIR_TO_MAKE_SYM};
  if (abi >= 2) rules.files |= REFER;
  if (abi >= 3) rules.files |= TRUNCATE;
  int set = (int)syscall(444, &rules, sizeof rules, 0);
  if (set < 0) return 0;
  for (const char *one = kept; *one; one += strlen(one) + 1) {
    struct stat st;
    struct below below = {rules.files, (int)sys_open(one, O_PATH | O_CLOEXEC, 0)};
    if (below.folder < 0) continue;
    if (sys_stat(one, &st, 1) == 0 && !S_ISDIR(st.st_mode)) below.allowed &= WRITE_FILE | TRUNCATE;
    syscall(445, set, 1, &below, 0);
    close(below.folder);
  }
  int held = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(446, set, 0) == 0;
  close(set);
  return held;
}

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#else
#define MACHINE AUDIT_ARCH_AARCH64
#endif
#define SAY(code, k) BPF_STMT(code, k)
#define ASK(k, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, k, yes, no)
#define ARGUMENT(n) SAY(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[n]))

#define FCHMODAT2 452 /* as the next ones, on every machine */
static const int TRAPPED[] = {
    425, 463, 466, 469, /* io_uring_setup, setxattrat, removexattrat, file_setattr: there is none, see `answer` */
    SYS_open_by_handle_at, FCHMODAT2, SYS_fchmod, SYS_fchown, SYS_fsetxattr, SYS_fremovexattr,
    SYS_unlinkat, SYS_mkdirat, SYS_symlinkat, SYS_linkat, SYS_mknodat, SYS_renameat, SYS_renameat2, SYS_fchmodat,
    SYS_fchownat, SYS_truncate, SYS_utimensat, SYS_setxattr, SYS_lsetxattr, SYS_removexattr, SYS_lremovexattr,
#ifdef SYS_open
    SYS_creat, SYS_unlink, SYS_rmdir, SYS_mkdir, SYS_symlink, SYS_link, SYS_mknod, SYS_rename, SYS_chmod,
    SYS_chown, SYS_lchown, SYS_utime, SYS_utimes, SYS_futimesat,
#endif
#ifdef SYS_openat2
    SYS_openat2,
#endif
};

/* Trap what opens files to write and what changes them, but for this library's own calls. */
static int trap(void) {
  enum { COUNT = sizeof TRAPPED / sizeof *TRAPPED };
  struct sock_filter lines[64 + COUNT];
  int n = 0;
  lines[n++] = (struct sock_filter)SAY(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
  lines[n++] = (struct sock_filter)ASK(MACHINE, 1, 0);
  lines[n++] = (struct sock_filter)SAY(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS); /* of 32 bits */
  lines[n++] = (struct sock_filter)SAY(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  int first = n; /* each jumps to one of three ends: flags of open, flags of openat, the sixth argument */
#ifdef SYS_open
  lines[n++] = (struct sock_filter)ASK(SYS_open, 0, 0);
#endif
  lines[n++] = (struct sock_filter)ASK(SYS_openat, 0, 0);
  for (int at = 0; at < COUNT; at++) lines[n++] = (struct sock_filter)ASK((unsigned)TRAPPED[at], 0, 0);
  lines[n++] = (struct sock_filter)SAY(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  int of_open = n;
  lines[n++] = (struct sock_filter)ARGUMENT(1);
  lines[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JA, 1, 0, 0);
  int of_openat = n;
  lines[n++] = (struct sock_filter)ARGUMENT(2);
  lines[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_WRONLY | O_RDWR | O_CREAT | O_TRUNC, 1, 0);
  lines[n++] = (struct sock_filter)SAY(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  int last = n;
  lines[n++] = (struct sock_filter)ARGUMENT(5);
  lines[n++] = (struct sock_filter)ASK((uint32_t)OWN, 0, 3);
  lines[n++] = (struct sock_filter)SAY(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[5]) + 4);
  lines[n++] = (struct sock_filter)ASK((uint32_t)(OWN >> 32), 0, 1);
  lines[n++] = (struct sock_filter)SAY(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  lines[n++] = (struct sock_filter)SAY(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
  for (int at = first; at < of_open - 1; at++) {
    int to = lines[at].k == SYS_openat ? of_openat : last;
#ifdef SYS_open
    if (lines[at].k == SYS_open) to = of_open;
#endif
    lines[at].jt = (uint8_t)(to - at - 1);
  }
  struct sock_fprog program = {(unsigned short)n, lines};
  return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}

static void answer_traps(void);
static int held;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void set_up(void) {
  const char *folder = getenv("TUNER_FILES"), *named = getenv("TUNER_FILES_KEPT");
  if (folder == NULL || *folder != '/' || strlen(folder) > PATH_MAX / 2) return;
  char path[PATH_MAX];
  size_t at = snprintf(kept, sizeof kept, "%s", folder) + 1;
  for (; named && *named && at < sizeof kept - 2; at++, named += *named == '\n')
    for (; *named && *named != '\n' && at < sizeof kept - 2; named++) kept[at++] = *named;
  const char *before = getenv("TUNER_FILES_HELD"); /* a process that is held starts held ones */
  /* The folders that tuner makes for what the program leaves behind and what it compiles. */
  for (int n = 0; n < 2 && before == NULL; n++) {
    const char *one = getenv(n ? "TORCHINDUCTOR_CACHE_DIR" : "TMPDIR");
    struct stat st;
    if (!one || *one != '/' || at + strlen(one) > sizeof kept - 3 || sys_stat(one, &st, 1) < 0) continue;
    at += strlen(strcpy(kept + at, one)) + 1;
    named = getenv("TUNER_FILES_KEPT");
    char *both = malloc((named ? strlen(named) : 0) + strlen(one) + 2);
    if (both == NULL) return;
    sprintf(both, "%s\n%s", named ? named : "", one);
    setenv("TUNER_FILES_KEPT", both, 1);
    free(both);
  }
  snprintf(path, sizeof path, "%s/changed", folder);
  int file = (int)sys_open(path, O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return;
  void *shared = mmap(NULL, sizeof *changed, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return;
  changed = shared;
  snprintf(root, sizeof root, "%s", folder);
  answer_traps();
  held = before && *before == '1';
  if (before == NULL) {
    held = hold() + (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && trap()) > 0;
    setenv("TUNER_FILES_HELD", held ? "1" : "0", 1);
  }
}

__attribute__((constructor)) static void begin(void) { pthread_once(&once, set_up); }

static int off(void) { return *root == 0; }

/* -- looking up -------------------------------------------------------------------------------- */

enum where { NONE, REAL, NEW };

struct found {
  char path[PATH_MAX];  /* where the program has it, without links */
  char place[PATH_MAX]; /* where it is, or is to be made */
  enum where where;
  int kept;   /* it is left to the system at `place` */
  int hidden; /* the real file of this path is not seen */
  struct stat st;
};

static void new_of(const char *path, char *place) { snprintf(place, PATH_MAX, "%s/new%s", root, path); }

static int marked(const char *path) {
  char mark[PATH_MAX];
  snprintf(mark, sizeof mark, "%s/gone%s%s", root, path, MARK);
  return there(mark);
}

/* `path` as the program has it: without the prefix of `new`. */
static const char *seen(const char *path) {
  size_t length = strlen(root);
  if (strncmp(path, root, length) == 0 && strncmp(path + length, "/new", 4) == 0) {
    const char *rest = path + length + 4;
    if (*rest == 0) return "/";
    if (*rest == '/') return rest;
  }
  return path;
}

/* The path behind a descriptor, as the program has it; 0 if it has none. */
static int path_of(int fd, char *path) {
  char name[64], target[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  long length = sys_readlink(name, target, sizeof target - 1);
  if (length <= 0 || target[0] != '/') return 0;
  target[length] = 0;
  snprintf(path, PATH_MAX, "%s", seen(target));
  return 1;
}

static int absolute(int fd, const char *path, char *whole) {
  if (*path == '/') return snprintf(whole, PATH_MAX, "%s", path) < PATH_MAX;
  char base[PATH_MAX];
  if (fd == AT_FDCWD) {
    if (syscall(SYS_getcwd, base, sizeof base) < 0 || *base != '/') return 0;
    memmove(base, seen(base), strlen(seen(base)) + 1);
  } else if (!path_of(fd, base)) {
    return 0;
  }
  return snprintf(whole, PATH_MAX, "%s/%s", base, path) < PATH_MAX;
}

/* Looks `path` up. 0, or -1 with errno for a folder of it that is missing. A path that says nothing
 * to this layer (too long, of a descriptor without a path) is left to the system. */
static int find(int fd, const char *path, int follow, struct found *f) {
  char todo[PATH_MAX], target[PATH_MAX];
  f->kept = 1, f->hidden = 0, f->where = REAL;
  if (!absolute(fd, path, todo)) {
    snprintf(f->place, PATH_MAX, "%s", path);
    return 0;
  }
  size_t whole = strlen(todo);
  int as_folder = whole > 1 && (todo[whole - 1] == '/' || (whole > 2 && !strcmp(todo + whole - 2, "/.")));
  for (int links = 0; links <= LINKS;) {
    char *rest = todo, *out = f->path;
    size_t used = 0;
    int again = 0, marks = 1;
    f->hidden = 0, f->where = REAL, *out = 0;
    while (*rest && !again) {
      while (*rest == '/') rest++;
      size_t length = strcspn(rest, "/");
      if (length == 0) break;
      if (length == 1 && rest[0] == '.') { rest++; continue; }
      if (length == 2 && rest[0] == '.' && rest[1] == '.') {
        char *slash = strrchr(out, '/');
        if (slash) *slash = 0;
        rest += 2;
        snprintf(target, PATH_MAX, "%s%s", out, rest); /* what is hidden is found out from the root */
        memcpy(todo, target, PATH_MAX);
        again = 1;
        break;
      }
      if (f->where == NONE) return fail(ENOENT);
      if (*out && !S_ISDIR(f->st.st_mode)) return fail(ENOTDIR);
      if (used + length + 2 >= PATH_MAX) return fail(ENAMETOOLONG);
      used = strlen(out);
      out[used] = '/';
      memcpy(out + used + 1, rest, length);
      out[used + 1 + length] = 0;
      rest += length;
      if (is_kept(out)) {
        if (snprintf(f->place, PATH_MAX, "%s%s", out, rest) >= PATH_MAX) return fail(ENAMETOOLONG);
        snprintf(f->path, PATH_MAX, "%s", f->place);
        return 0;
      }
      if (marks && !f->hidden) {
        f->hidden = marked(out);
        if (!f->hidden) { /* no mark lies below a folder without marks */
          snprintf(target, PATH_MAX, "%s/gone%s", root, out);
          marks = there(target);
        }
      }
      new_of(out, f->place);
      if (sys_stat(f->place, &f->st, 0) == 0) {
        f->where = NEW;
      } else if (!f->hidden && sys_stat(out, &f->st, 0) == 0) {
        f->where = REAL;
        snprintf(f->place, PATH_MAX, "%s", out);
      } else if (!f->hidden && errno != ENOENT && errno != ENOTDIR) {
        return -1;
      } else {
        f->where = NONE;
        continue;
      }
      size_t more = strspn(rest, "/");
      if (S_ISLNK(f->st.st_mode) && (follow || as_folder || rest[more])) {
        long size = sys_readlink(f->place, target, PATH_MAX - 1);
        if (size < 0) return -1;
        target[size] = 0;
        char next[PATH_MAX];
        out[used] = 0;
        int fits = target[0] == '/' ? snprintf(next, PATH_MAX, "%s%s", target, rest)
                                    : snprintf(next, PATH_MAX, "%s/%s%s", out, target, rest);
        if (fits >= PATH_MAX) return fail(ENAMETOOLONG);
        memcpy(todo, next, PATH_MAX);
        links++, again = 1;
      }
    }
    if (again) continue;
    f->kept = 0;
    if (*out == 0) { /* the root itself */
      strcpy(out, "/"), strcpy(f->place, "/");
      return (int)sys_stat("/", &f->st, 1);
    }
    if (f->where == NONE) new_of(out, f->place);
    if (as_folder && f->where != NONE && !S_ISDIR(f->st.st_mode)) return fail(ENOTDIR);
    return 0;
  }
  return fail(ELOOP);
}

/* A path to read by: the given one where nothing was changed yet, else where the file is.
 * NULL with errno if there is none. */
static const char *to_read(int *fd, const char *path, int follow, struct found *f) {
  if (off() || path == NULL || *path == 0 || !*changed) {
    begin();
    if (off() || path == NULL || *path == 0 || !*changed) return path;
  }
  if (find(*fd, path, follow, f) < 0) return NULL;
  if (f->kept && *f->place != '/') return path; /* of a descriptor */
  if (f->where == NONE) return errno = ENOENT, NULL;
  *fd = AT_FDCWD;
  return f->place;
}

/* -- changing ---------------------------------------------------------------------------------- */

static void parent_of(const char *path, char *parent) {
  snprintf(parent, PATH_MAX, "%s", path);
  char *slash = strrchr(parent, '/');
  if (slash) slash[slash == parent] = 0;
}

static int real_is_writable(const char *path) {
  return syscall(SYS_faccessat2, AT_FDCWD, path, W_OK, AT_EACCESS) == 0 || errno == ENOSYS ? 1 : 0;
}

/* Make the folders of a path in `new`, with the modes of the real ones. */
static int make_folders(const char *path) {
  char one[PATH_MAX], place[PATH_MAX];
  *changed = 1;
  for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    struct stat st;
    snprintf(one, sizeof one, "%.*s", (int)(slash - path), path);
    new_of(one, place);
    if (there(place)) continue;
    mode_t mode = sys_stat(one, &st, 1) == 0 ? st.st_mode & 07777 : 0755;
    if (sys_mkdir(place, 0700) < 0 && errno != EEXIST) return -1;
    syscall(SYS_fchmodat, AT_FDCWD, place, mode | 0700, 0L, 0L, OWN);
  }
  return 0;
}

/* True if an entry may be made or removed in the folder of this path. */
static int parent_is_writable(const struct found *f) {
  char parent[PATH_MAX], place[PATH_MAX];
  struct stat st;
  parent_of(f->path, parent);
  new_of(parent, place);
  if (f->hidden || sys_stat(parent, &st, 1) < 0) return 1; /* made by the program */
  return real_is_writable(parent);
}

static int copy_bytes(int from, int to, off_t size) {
  while (size > 0) { /* the file systems share the blocks if they can */
    ssize_t done = syscall(SYS_copy_file_range, from, NULL, to, NULL, (size_t)size, 0);
    if (done <= 0) break;
    size -= done;
  }
  char *buffer = size > 0 ? malloc(1 << 20) : NULL;
  while (size > 0 && buffer) {
    ssize_t done = syscall(SYS_read, from, buffer, 1 << 20);
    if (done == 0) break;
    if (done < 0 || syscall(SYS_write, to, buffer, done) != done) {
      free(buffer);
      return -1;
    }
    size -= done;
  }
  free(buffer);
  return 0;
}

static int merged(const struct found *f, int (*each)(const char *, void *), void *with);
static int copy_up(struct found *f, int content);

static int copy_entry(const char *name, void *with) {
  const struct found *folder = with;
  char path[PATH_MAX];
  struct found *one = malloc(sizeof *one);
  if (one == NULL) return fail(ENOMEM);
  snprintf(path, sizeof path, "%s/%s", folder->path, name);
  int failed = find(AT_FDCWD, path, 0, one) < 0 || (!one->kept && copy_up(one, 2) < 0);
  free(one);
  return failed ? -1 : 0;
}

/* Copy what is found to `new`, with its content (0: empty; 2: a folder with all that is in it). */
static int copy_up(struct found *f, int content) {
  char place[PATH_MAX], draft[PATH_MAX], target[PATH_MAX];
  new_of(f->path, place);
  if (make_folders(f->path) < 0) return -1;
  if (f->where == REAL && S_ISDIR(f->st.st_mode)) {
    if (sys_mkdir(place, 0700) < 0 && errno != EEXIST) return -1;
    syscall(SYS_fchmodat, AT_FDCWD, place, (f->st.st_mode & 07777) | 0700, 0L, 0L, OWN);
  } else if (f->where == REAL) {
    snprintf(draft, sizeof draft, "%s/draft-%ld", root, (long)syscall(SYS_gettid));
    sys_unlink(draft, 0);
    if (S_ISLNK(f->st.st_mode)) {
      long size = sys_readlink(f->place, target, PATH_MAX - 1);
      if (size < 0) return -1;
      target[size] = 0;
      if (syscall(SYS_symlinkat, target, AT_FDCWD, draft, 0L, 0L, OWN) < 0) return -1;
    } else if (S_ISREG(f->st.st_mode)) {
      int to = (int)sys_open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600), failed = to < 0;
      if (!failed && content) {
        int from = (int)sys_open(f->place, O_RDONLY | O_CLOEXEC, 0);
        failed = from < 0 || copy_bytes(from, to, f->st.st_size) < 0;
        if (from >= 0) syscall(SYS_close, from);
      }
      struct timespec times[2] = {f->st.st_atim, f->st.st_mtim};
      if (!failed) {
        syscall(SYS_fchmod, to, f->st.st_mode & 07777, 0L, 0L, 0L, OWN);
        syscall(SYS_utimensat, to, NULL, times, 0, 0L, OWN);
      }
      if (to >= 0) syscall(SYS_close, to);
      if (failed) {
        int error = errno;
        sys_unlink(draft, 0);
        return fail(error);
      }
    } else {
      return 0; /* pipes and sockets stay where they are */
    }
    if (syscall(SYS_renameat2, AT_FDCWD, draft, AT_FDCWD, place, 1, OWN) < 0) { /* RENAME_NOREPLACE */
      if (errno == EINVAL && !there(place)) syscall(SYS_renameat2, AT_FDCWD, draft, AT_FDCWD, place, 0, OWN);
      sys_unlink(draft, 0); /* another process was first */
    }
  }
  if (content == 2 && S_ISDIR(f->st.st_mode) && merged(f, copy_entry, f) < 0) return -1;
  f->where = NEW;
  memcpy(f->place, place, PATH_MAX);
  return 0;
}

/* Hide the real file of a path. */
static int mark_gone(const struct found *f) {
  char mark[PATH_MAX];
  if (f->hidden || !there(f->path)) return 0;
  *changed = 1;
  snprintf(mark, sizeof mark, "%s/gone%s%s", root, f->path, MARK);
  for (char *slash = strchr(mark + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    sys_mkdir(mark, 0755);
    *slash = '/';
  }
  int file = (int)sys_open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  return file < 0 ? -1 : (int)syscall(SYS_close, file);
}

/* Where to open a file; NULL with errno. For one that is written, the place is made ready. */
static const char *to_open(int *fd, const char *path, int flags, struct found *f) {
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC) ||
               (flags & O_TMPFILE) == O_TMPFILE;
  int only_new = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
  int follow = !(flags & O_NOFOLLOW) && !only_new;
  if (!writes) return to_read(fd, path, follow, f);
  begin();
  if (off() || path == NULL || *path == 0) return path;
  if (find(*fd, path, follow, f) < 0) return NULL;
  if (f->kept) {
    if (*f->place != '/') return path;
  } else if ((flags & O_TMPFILE) == O_TMPFILE) {
    if (f->where == NONE) return errno = ENOENT, NULL;
    if (copy_up(f, 1) < 0) return NULL;
  } else if (f->where == NONE) {
    if (!(flags & O_CREAT)) return errno = ENOENT, NULL;
    if (!parent_is_writable(f) || make_folders(f->path) < 0) return NULL;
  } else if (f->where == REAL && S_ISREG(f->st.st_mode)) {
    if (only_new) return errno = EEXIST, NULL;
    if ((flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC) {
      if (!real_is_writable(f->path) || copy_up(f, !(flags & O_TRUNC)) < 0) return NULL;
    }
  }
  *fd = AT_FDCWD;
  return f->place;
}

/* Where to change the properties of a file; NULL with errno. */
static const char *to_change(int *fd, const char *path, int follow, struct found *f) {
  begin();
  if (off() || path == NULL || *path == 0) return path;
  if (find(*fd, path, follow, f) < 0) return NULL;
  if (f->kept && *f->place != '/') return path;
  if (!f->kept && f->where == NONE) return errno = ENOENT, NULL;
  if (!f->kept && f->where == REAL && copy_up(f, 1) < 0) return NULL;
  *fd = AT_FDCWD;
  return f->place;
}

/* The same for what is behind a descriptor: `path` of it if it is a real file, else NULL. */
static const char *behind(int fd, char *path) {
  struct stat st;
  char name[64], target[PATH_MAX];
  begin();
  if (off() || fd < 0) return NULL;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  long size = sys_readlink(name, target, sizeof target - 1);
  if (size <= 0 || *target != '/') return NULL;
  target[size] = 0;
  if (is_kept(target) || sys_stat(target, &st, 0) < 0) return NULL;
  return strcpy(path, target);
}

/* Where to make an entry; NULL with errno. */
static const char *to_make(int *fd, const char *path, struct found *f) {
  begin();
  if (off() || path == NULL || *path == 0) return path;
  char plain[PATH_MAX]; /* "folder/" is made as "folder" */
  size_t length = strnlen(path, PATH_MAX - 1);
  memcpy(plain, path, length);
  while (length > 1 && plain[length - 1] == '/') length--;
  plain[length] = 0;
  if (find(*fd, plain, 0, f) < 0) return NULL;
  if (f->kept && *f->place != '/') return path;
  if (!f->kept) {
    if (f->where != NONE) return errno = EEXIST, NULL;
    if (!parent_is_writable(f) || make_folders(f->path) < 0) return NULL;
  }
  *fd = AT_FDCWD;
  return f->place;
}

/* -- entries of folders ------------------------------------------------------------------------ */

struct listing {
  DIR *shown; /* what the program has */
  DIR *real;  /* where `shown` is the folder in `new`: the real one, read first; may be NULL */
  char path[PATH_MAX];
  struct listing *next;
};

static struct listing *listings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define LATER(result, name, ...)                                            \
  static result (*later_##name)(__VA_ARGS__);                               \
  if (!later_##name) later_##name = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static struct dirent64 *next_of(DIR *folder) {
  LATER(struct dirent64 *, readdir64, DIR *);
  return later_readdir64(folder);
}

static DIR *open_folder(const char *path) {
  LATER(DIR *, opendir, const char *);
  return later_opendir(path);
}

/* 0 for an entry of the real folder that is deleted or also in `new`. Readers of folders tell their
 * end from an error by errno, which stays as it is. */
static int shows(const char *path, const char *name) {
  char one[PATH_MAX], place[PATH_MAX];
  int error = errno;
  if (snprintf(one, sizeof one, "%s/%s", strcmp(path, "/") ? path : "", name) >= PATH_MAX) return 1;
  new_of(one, place);
  int shown = !there(place) && !marked(one);
  errno = error;
  return shown;
}

static int is_dots(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

static int close_folder(DIR *folder) {
  LATER(int, closedir, DIR *);
  return later_closedir(folder);
}

/* Call `each` with every entry of the folder until it returns something else than 0. */
static int merged(const struct found *f, int (*each)(const char *, void *), void *with) {
  char place[PATH_MAX];
  int result = 0;
  new_of(f->path, place);
  for (int in_new = 0; in_new < 2 && !result; in_new++) {
    if (!in_new && f->hidden) continue;
    DIR *folder = open_folder(in_new ? place : f->path);
    struct dirent64 *entry;
    while (folder && !result && (entry = next_of(folder)))
      if (!is_dots(entry->d_name) && (in_new || shows(f->path, entry->d_name))) result = each(entry->d_name, with);
    if (folder) close_folder(folder);
  }
  return result;
}

static int any_entry(const char *name, void *with) { return 1; }

/* Remember that a folder is read with the entries of the real one, or without those deleted. */
static DIR *remembered(DIR *shown, const struct found *f) {
  char marks[PATH_MAX];
  DIR *real = NULL;
  snprintf(marks, sizeof marks, "%s/gone%s", root, f->path);
  if (shown == NULL) return NULL;
  if (f->where == NEW && (f->hidden || (real = open_folder(f->path)) == NULL)) return shown;
  if (f->where == REAL && !there(marks)) return shown;
  struct listing *one = malloc(sizeof *one);
  if (one == NULL) return shown;
  one->shown = shown, one->real = real;
  memcpy(one->path, f->path, PATH_MAX);
  pthread_mutex_lock(&lock);
  one->next = listings, listings = one;
  pthread_mutex_unlock(&lock);
  return shown;
}

static struct listing *listing_of(DIR *shown, int take) {
  if (listings == NULL) return NULL;
  pthread_mutex_lock(&lock);
  struct listing **at = &listings, *one;
  while (*at && (*at)->shown != shown) at = &(*at)->next;
  if ((one = *at) && take) *at = one->next;
  pthread_mutex_unlock(&lock);
  return one;
}

EXPORT DIR *opendir(const char *path) {
  struct found f;
  int fd = AT_FDCWD;
  const char *place = to_read(&fd, path, 1, &f);
  if (place == NULL) return NULL;
  return place == path || f.kept ? open_folder(place) : remembered(open_folder(place), &f);
}

EXPORT DIR *fdopendir(int fd) {
  LATER(DIR *, fdopendir, int);
  char path[PATH_MAX];
  struct found f;
  struct stat st, now;
  begin();
  if (off() || !*changed || !path_of(fd, path) || find(AT_FDCWD, path, 1, &f) < 0 || f.kept || f.where == NONE)
    return later_fdopendir(fd);
  if (sys_stat(f.place, &st, 1) == 0 && syscall(SYS_newfstatat, fd, "", &now, AT_EMPTY_PATH) == 0 &&
      now.st_ino != st.st_ino) { /* opened before the folder came to be in `new` */
    int other = (int)sys_open(f.place, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (other < 0 || dup3(other, fd, O_CLOEXEC) < 0) return NULL;
    syscall(SYS_close, other);
  }
  return remembered(later_fdopendir(fd), &f);
}

EXPORT struct dirent64 *readdir64(DIR *folder) {
  struct listing *one = listing_of(folder, 0);
  struct dirent64 *entry;
  while (one && one->real && (entry = next_of(one->real)))
    if (!is_dots(entry->d_name) && shows(one->path, entry->d_name)) return entry;
  while ((entry = next_of(folder)))
    if (!one || one->real || is_dots(entry->d_name) || shows(one->path, entry->d_name)) break;
  return entry;
}
/* On 64-bit Linux both structures are the same. */
EXPORT struct dirent *readdir(DIR *folder) { return (struct dirent *)readdir64(folder); }

EXPORT void rewinddir(DIR *folder) {
  LATER(void, rewinddir, DIR *);
  struct listing *one = listing_of(folder, 0);
  if (one && one->real) later_rewinddir(one->real);
  later_rewinddir(folder);
}

EXPORT int closedir(DIR *folder) {
  struct listing *one = listing_of(folder, 1);
  if (one && one->real) close_folder(one->real);
  free(one);
  return close_folder(folder);
}

/* -- files ------------------------------------------------------------------------------------- */

static int open_at(int fd, const char *path, int flags, mode_t mode) {
  struct found f;
  const char *place = to_open(&fd, path, flags, &f);
  return place ? (int)syscall(SYS_openat, fd, place, flags, mode, 0L, OWN) : -1;
}

#define MODE(flags)                                             \
  mode_t mode = 0;                                              \
  if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {    \
    va_list rest;                                               \
    va_start(rest, flags);                                      \
    mode = va_arg(rest, mode_t);                                \
    va_end(rest);                                               \
  }
EXPORT int open(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
EXPORT int open64(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
EXPORT int openat(int fd, const char *path, int flags, ...) { MODE(flags) return open_at(fd, path, flags, mode); }
EXPORT int openat64(int fd, const char *path, int flags, ...) { MODE(flags) return open_at(fd, path, flags, mode); }
EXPORT int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
EXPORT int __openat_2(int fd, const char *path, int flags) { return open_at(fd, path, flags, 0); }
EXPORT int __openat64_2(int fd, const char *path, int flags) { return open_at(fd, path, flags, 0); }
EXPORT int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
EXPORT int creat64(const char *path, mode_t mode) { return creat(path, mode); }

static int flags_of(const char *mode) {
  int flags = strchr(mode, '+') ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY;
  if (*mode == 'w') flags |= O_CREAT | O_TRUNC;
  if (*mode == 'a') flags |= O_CREAT;
  if (strchr(mode, 'x')) flags |= O_EXCL;
  return flags;
}
#define STREAM(name)                                                       \
  EXPORT FILE *name(const char *path, const char *mode) {                  \
    LATER(FILE *, name, const char *, const char *);                       \
    struct found f;                                                        \
    int fd = AT_FDCWD;                                                     \
    const char *place = to_open(&fd, path, flags_of(mode), &f);            \
    return place ? later_##name(place, mode) : NULL;                       \
  }
STREAM(fopen)
STREAM(fopen64)
#define STREAM_AGAIN(name)                                                 \
  EXPORT FILE *name(const char *path, const char *mode, FILE *file) {      \
    LATER(FILE *, name, const char *, const char *, FILE *);               \
    struct found f;                                                        \
    int fd = AT_FDCWD;                                                     \
    const char *place = to_open(&fd, path, flags_of(mode), &f);            \
    return place || !path ? later_##name(place, mode, file) : NULL;        \
  }
STREAM_AGAIN(freopen)
STREAM_AGAIN(freopen64)

static int make_temporary(char *name, int suffix, int flags, int folder) {
  size_t length = strlen(name);
  if (length < 6 + (size_t)suffix) return fail(EINVAL);
  char *letters = name + length - suffix - 6;
  for (int tries = 0; tries < 1000; tries++) {
    uint32_t number[6];
    syscall(SYS_getrandom, number, sizeof number, 0);
    for (int at = 0; at < 6; at++)
      letters[at] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[number[at] % 62];
    struct found f;
    int fd = AT_FDCWD, made;
    if (folder) {
      const char *place = to_make(&fd, name, &f);
      made = place ? (int)syscall(SYS_mkdirat, fd, place, 0700, 0L, 0L, OWN) : -1;
    } else {
      made = open_at(fd, name, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
    }
    if (made >= 0 || errno != EEXIST) return made;
  }
  return fail(EEXIST);
}
EXPORT int mkstemp(char *name) { return make_temporary(name, 0, 0, 0); }
EXPORT int mkstemp64(char *name) { return make_temporary(name, 0, 0, 0); }
EXPORT int mkostemp(char *name, int flags) { return make_temporary(name, 0, flags, 0); }
EXPORT int mkostemp64(char *name, int flags) { return make_temporary(name, 0, flags, 0); }
EXPORT int mkstemps(char *name, int suffix) { return make_temporary(name, suffix, 0, 0); }
EXPORT int mkstemps64(char *name, int suffix) { return make_temporary(name, suffix, 0, 0); }
EXPORT int mkostemps(char *name, int suffix, int flags) { return make_temporary(name, suffix, flags, 0); }
EXPORT int mkostemps64(char *name, int suffix, int flags) { return make_temporary(name, suffix, flags, 0); }
EXPORT char *mkdtemp(char *name) { return make_temporary(name, 0, 0, 1) < 0 ? NULL : name; }

/* -- properties that are read ------------------------------------------------------------------ */

static int stat_at(int fd, const char *path, struct stat *st, int flags) {
  struct found f;
  const char *place = to_read(&fd, path, !(flags & AT_SYMLINK_NOFOLLOW), &f);
  return place || !path ? (int)syscall(SYS_newfstatat, fd, place, st, flags) : -1;
}
#define STATS(end, type)                                                                            \
  EXPORT int stat##end(const char *p, type *st) { return stat_at(AT_FDCWD, p, (void *)st, 0); }     \
  EXPORT int lstat##end(const char *p, type *st) {                                                  \
    return stat_at(AT_FDCWD, p, (void *)st, AT_SYMLINK_NOFOLLOW);                                   \
  }                                                                                                 \
  EXPORT int fstatat##end(int fd, const char *p, type *st, int flags) {                             \
    return stat_at(fd, p, (void *)st, flags);                                                       \
  }                                                                                                 \
  EXPORT int __xstat##end(int v, const char *p, type *st) {                                         \
    return stat_at(AT_FDCWD, p, (void *)st, 0);                                                     \
  }                                                                                                 \
  EXPORT int __lxstat##end(int v, const char *p, type *st) {                                        \
    return stat_at(AT_FDCWD, p, (void *)st, AT_SYMLINK_NOFOLLOW);                                   \
  }                                                                                                 \
  EXPORT int __fxstatat##end(int v, int fd, const char *p, type *st, int flags) {                   \
    return stat_at(fd, p, (void *)st, flags);                                                       \
  }
STATS(, struct stat)
STATS(64, struct stat64)

EXPORT int statx(int fd, const char *path, int flags, unsigned mask, struct statx *st) {
  struct found f;
  const char *place = to_read(&fd, path, !(flags & AT_SYMLINK_NOFOLLOW), &f);
  return place || !path ? (int)syscall(SYS_statx, fd, place, flags, mask, st) : -1;
}
EXPORT int faccessat(int fd, const char *path, int mode, int flags) {
  struct found f;
  const char *place = to_read(&fd, path, !(flags & AT_SYMLINK_NOFOLLOW), &f);
  if (!place) return -1;
  if (flags == 0) return (int)syscall(SYS_faccessat, fd, place, mode);
  return (int)syscall(SYS_faccessat2, fd, place, mode, flags);
}
EXPORT int access(const char *path, int mode) { return faccessat(AT_FDCWD, path, mode, 0); }
EXPORT int euidaccess(const char *path, int mode) { return faccessat(AT_FDCWD, path, mode, AT_EACCESS); }
EXPORT int eaccess(const char *path, int mode) { return euidaccess(path, mode); }

EXPORT ssize_t readlinkat(int fd, const char *path, char *to, size_t size) {
  struct found f;
  const char *place = to_read(&fd, path, 0, &f);
  ssize_t length = place ? syscall(SYS_readlinkat, fd, place, to, size) : -1;
  if (length > 0 && !off() && place && is_kept(place)) { /* /proc/self/cwd, /proc/self/fd */
    char target[PATH_MAX];
    snprintf(target, sizeof target, "%.*s", (int)length, to);
    const char *rest = seen(target);
    if (rest != target) memcpy(to, rest, length = strlen(rest));
  }
  return length;
}
EXPORT ssize_t readlink(const char *path, char *to, size_t size) { return readlinkat(AT_FDCWD, path, to, size); }
EXPORT ssize_t __readlink_chk(const char *path, char *to, size_t size, size_t room) { return readlink(path, to, size); }

EXPORT char *realpath(const char *path, char *to) {
  LATER(char *, realpath, const char *, char *);
  struct found f;
  begin();
  if (off() || path == NULL || *path == 0 || !*changed) return later_realpath(path, to);
  if (find(AT_FDCWD, path, 1, &f) < 0) return NULL;
  if (f.kept) return later_realpath(f.place, to);
  if (f.where == NONE) return errno = ENOENT, NULL;
  if (to == NULL && (to = malloc(PATH_MAX)) == NULL) return NULL;
  return strcpy(to, f.path);
}
EXPORT char *__realpath_chk(const char *path, char *to, size_t room) { return realpath(path, to); }
EXPORT char *canonicalize_file_name(const char *path) { return realpath(path, NULL); }

EXPORT char *getcwd(char *to, size_t size) {
  char path[PATH_MAX];
  if (syscall(SYS_getcwd, path, sizeof path) < 0) return NULL;
  const char *shown = off() ? path : seen(path);
  size_t length = strlen(shown) + 1;
  if (to != NULL && size < length) return errno = size ? ERANGE : EINVAL, NULL;
  if (to == NULL && (to = malloc(size > length ? size : length)) == NULL) return NULL;
  return memcpy(to, shown, length);
}
EXPORT char *__getcwd_chk(char *to, size_t size, size_t room) { return getcwd(to, size); }
EXPORT char *get_current_dir_name(void) { return getcwd(NULL, 0); }

#define READS(result, name, follow, call, ...)                        \
  EXPORT result name(const char *path, ##__VA_ARGS__) {               \
    struct found f;                                                   \
    int fd = AT_FDCWD;                                                \
    const char *place = to_read(&fd, path, follow, &f);               \
    return place ? (result)(call) : (result)-1;                       \
  }
READS(int, chdir, 1, syscall(SYS_chdir, place))
READS(int, statfs, 1, syscall(SYS_statfs, place, st), struct statfs *st)
READS(int, statfs64, 1, syscall(SYS_statfs, place, st), struct statfs64 *st)
READS(ssize_t, getxattr, 1, syscall(SYS_getxattr, place, name, value, size), const char *name, void *value, size_t size)
READS(ssize_t, lgetxattr, 0, syscall(SYS_lgetxattr, place, name, value, size), const char *name, void *value, size_t size)
READS(ssize_t, listxattr, 1, syscall(SYS_listxattr, place, list, size), char *list, size_t size)
READS(ssize_t, llistxattr, 0, syscall(SYS_llistxattr, place, list, size), char *list, size_t size)

/* -- entries that are made, removed and renamed ------------------------------------------------- */

static int remove_at(int fd, const char *path, int flags) {
  struct found f;
  begin();
  if (off() || path == NULL || *path == 0) return (int)syscall(SYS_unlinkat, fd, path, flags, 0L, 0L, OWN);
  if (find(fd, path, 0, &f) < 0) return -1;
  if (f.kept) return (int)syscall(SYS_unlinkat, *f.place == '/' ? AT_FDCWD : fd, f.place, flags, 0L, 0L, OWN);
  if (f.where == NONE) return fail(ENOENT);
  int is_folder = S_ISDIR(f.st.st_mode);
  if (is_folder && !(flags & AT_REMOVEDIR)) return fail(EISDIR);
  if (!is_folder && flags & AT_REMOVEDIR) return fail(ENOTDIR);
  if (is_folder && merged(&f, any_entry, NULL)) return fail(ENOTEMPTY);
  if (!parent_is_writable(&f)) return -1;
  if (f.where == NEW && sys_unlink(f.place, flags) < 0) return -1;
  return mark_gone(&f);
}
EXPORT int unlinkat(int fd, const char *path, int flags) { return remove_at(fd, path, flags); }
EXPORT int unlink(const char *path) { return remove_at(AT_FDCWD, path, 0); }
EXPORT int rmdir(const char *path) { return remove_at(AT_FDCWD, path, AT_REMOVEDIR); }
EXPORT int remove(const char *path) {
  int done = unlink(path);
  return done < 0 && (errno == EISDIR || errno == EPERM) ? rmdir(path) : done;
}

#define MAKES(call)                                                   \
  struct found f;                                                     \
  const char *place = to_make(&fd, path, &f);                         \
  return place ? (int)(call) : -1;
EXPORT int mkdirat(int fd, const char *path, mode_t mode) { MAKES(syscall(SYS_mkdirat, fd, place, mode, 0L, 0L, OWN)) }
EXPORT int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
EXPORT int symlinkat(const char *to, int fd, const char *path) { MAKES(syscall(SYS_symlinkat, to, fd, place, 0L, 0L, OWN)) }
EXPORT int symlink(const char *to, const char *path) { return symlinkat(to, AT_FDCWD, path); }
EXPORT int mknodat(int fd, const char *path, mode_t mode, dev_t dev) { MAKES(syscall(SYS_mknodat, fd, place, mode, dev, 0L, OWN)) }
EXPORT int mknod(const char *path, mode_t mode, dev_t dev) { return mknodat(AT_FDCWD, path, mode, dev); }
EXPORT int __xmknod(int v, const char *path, mode_t mode, dev_t *dev) { return mknodat(AT_FDCWD, path, mode, *dev); }
EXPORT int mkfifoat(int fd, const char *path, mode_t mode) { return mknodat(fd, path, S_IFIFO | (mode & 07777), 0); }
EXPORT int mkfifo(const char *path, mode_t mode) { return mkfifoat(AT_FDCWD, path, mode); }

EXPORT int linkat(int from_fd, const char *from, int fd, const char *path, int flags) {
  struct found f, g;
  begin();
  if (off() || *from == 0) return (int)syscall(SYS_linkat, from_fd, from, fd, path, flags, OWN);
  const char *source = to_change(&from_fd, from, !!(flags & AT_SYMLINK_FOLLOW), &f);
  const char *place = source ? to_make(&fd, path, &g) : NULL;
  return place ? (int)syscall(SYS_linkat, from_fd, source, fd, place, flags, OWN) : -1;
}
EXPORT int link(const char *from, const char *path) { return linkat(AT_FDCWD, from, AT_FDCWD, path, 0); }

static int rename_at(int from_fd, const char *from, int fd, const char *path, unsigned flags) {
  struct found f, g;
  begin();
  if (off()) return (int)syscall(SYS_renameat2, from_fd, from, fd, path, flags, OWN);
  if (find(from_fd, from, 0, &f) < 0 || find(fd, path, 0, &g) < 0) return -1;
  if (f.kept && g.kept)
    return (int)syscall(SYS_renameat2, *f.place == '/' ? AT_FDCWD : from_fd, f.place,
                        *g.place == '/' ? AT_FDCWD : fd, g.place, flags, OWN);
  if (f.kept || g.kept) return fail(EXDEV); /* as between two disks: it is copied */
  if (f.where == NONE) return fail(ENOENT);
  if (flags & ~1u) return fail(EINVAL);
  if (g.where != NONE) {
    if (flags & 1) return fail(EEXIST);
    if (!strcmp(f.path, g.path)) return 0;
    if (S_ISDIR(g.st.st_mode) && !S_ISDIR(f.st.st_mode)) return fail(EISDIR);
    if (!S_ISDIR(g.st.st_mode) && S_ISDIR(f.st.st_mode)) return fail(ENOTDIR);
    if (S_ISDIR(g.st.st_mode) && merged(&g, any_entry, NULL)) return fail(ENOTEMPTY);
  }
  if (within(g.path, f.path)) return fail(EINVAL);
  if (!parent_is_writable(&f) || !parent_is_writable(&g)) return -1;
  if (copy_up(&f, 2) < 0 || make_folders(g.path) < 0 || mark_gone(&g) < 0) return -1;
  new_of(g.path, g.place);
  if (sys_unlink(g.place, 0) < 0 && errno == EISDIR) sys_unlink(g.place, AT_REMOVEDIR);
  if (syscall(SYS_renameat2, AT_FDCWD, f.place, AT_FDCWD, g.place, 0, OWN) < 0) return -1;
  return mark_gone(&f);
}
EXPORT int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_at(a, from, b, to, flags); }
EXPORT int renameat(int a, const char *from, int b, const char *to) { return rename_at(a, from, b, to, 0); }
EXPORT int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }

/* -- properties that are changed --------------------------------------------------------------- */

#define CHANGES(follow, call)                                         \
  struct found f;                                                     \
  const char *place = to_change(&fd, path, follow, &f);               \
  return place || !path ? (int)(call) : -1;
#define HERE int fd = AT_FDCWD;
EXPORT int fchmodat(int fd, const char *path, mode_t mode, int flags) { CHANGES(1, syscall(SYS_fchmodat, fd, place, mode, 0L, 0L, OWN)) }
EXPORT int chmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
EXPORT int lchmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
EXPORT int fchownat(int fd, const char *path, uid_t u, gid_t g, int flags) {
  CHANGES(!(flags & AT_SYMLINK_NOFOLLOW), syscall(SYS_fchownat, fd, place, u, g, flags, OWN))
}
EXPORT int chown(const char *path, uid_t u, gid_t g) { return fchownat(AT_FDCWD, path, u, g, 0); }
EXPORT int lchown(const char *path, uid_t u, gid_t g) { return fchownat(AT_FDCWD, path, u, g, AT_SYMLINK_NOFOLLOW); }
EXPORT int truncate(const char *path, off_t size) { HERE CHANGES(1, syscall(SYS_truncate, place, size, 0L, 0L, 0L, OWN)) }
EXPORT int truncate64(const char *path, off64_t size) { return truncate(path, size); }
EXPORT int setxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
  HERE CHANGES(1, syscall(SYS_setxattr, place, name, value, size, flags, OWN))
}
EXPORT int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
  HERE CHANGES(0, syscall(SYS_lsetxattr, place, name, value, size, flags, OWN))
}
EXPORT int removexattr(const char *path, const char *name) { HERE CHANGES(1, syscall(SYS_removexattr, place, name, 0L, 0L, 0L, OWN)) }
EXPORT int lremovexattr(const char *path, const char *name) { HERE CHANGES(0, syscall(SYS_lremovexattr, place, name, 0L, 0L, 0L, OWN)) }

/* Apart from `utimensat`, whose declaration says that there is a path. */
static int set_times(int fd, const char *path, const struct timespec *times, int flags) {
  char real[PATH_MAX];
  if (path == NULL && (path = behind(fd, real)) == NULL) return (int)syscall(SYS_utimensat, fd, NULL, times, flags, 0L, OWN);
  CHANGES(!(flags & AT_SYMLINK_NOFOLLOW), syscall(SYS_utimensat, fd, place, times, flags, 0L, OWN))
}
EXPORT int utimensat(int fd, const char *path, const struct timespec times[2], int flags) { return set_times(fd, path, times, flags); }
static const struct timespec *fine(const struct timeval *times, struct timespec *to) {
  for (int at = 0; times && at < 2; at++) to[at] = (struct timespec){times[at].tv_sec, times[at].tv_usec * 1000};
  return times ? to : NULL;
}
EXPORT int futimens(int fd, const struct timespec times[2]) { return set_times(fd, NULL, times, 0); }
EXPORT int futimes(int fd, const struct timeval times[2]) { struct timespec to[2]; return futimens(fd, fine(times, to)); }
EXPORT int utimes(const char *path, const struct timeval times[2]) { struct timespec to[2]; return utimensat(AT_FDCWD, path, fine(times, to), 0); }
EXPORT int lutimes(const char *path, const struct timeval times[2]) { struct timespec to[2]; return utimensat(AT_FDCWD, path, fine(times, to), AT_SYMLINK_NOFOLLOW); }
EXPORT int futimesat(int fd, const char *path, const struct timeval times[2]) { struct timespec to[2]; return utimensat(fd, path, fine(times, to), 0); }
EXPORT int utime(const char *path, const struct utimbuf *times) {
  struct timespec to[2];
  if (times) to[0] = (struct timespec){times->actime, 0}, to[1] = (struct timespec){times->modtime, 0};
  return utimensat(AT_FDCWD, path, times ? to : NULL, 0);
}
#define OF_DESCRIPTOR(call, raw)                          \
  char path[PATH_MAX];                                    \
  return behind(fd, path) ? (call) : (int)(raw);
EXPORT int fchmod(int fd, mode_t mode) { OF_DESCRIPTOR(chmod(path, mode), syscall(SYS_fchmod, fd, mode, 0L, 0L, 0L, OWN)) }
EXPORT int fchown(int fd, uid_t u, gid_t g) { OF_DESCRIPTOR(chown(path, u, g), syscall(SYS_fchown, fd, u, g, 0L, 0L, OWN)) }
EXPORT int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags) {
  OF_DESCRIPTOR(setxattr(path, name, value, size, flags), syscall(SYS_fsetxattr, fd, name, value, size, flags, OWN))
}
EXPORT int fremovexattr(int fd, const char *name) {
  OF_DESCRIPTOR(removexattr(path, name), syscall(SYS_fremovexattr, fd, name, 0L, 0L, 0L, OWN))
}

/* -- sockets with a path ------------------------------------------------------------------------ */

static int with_path(long call, int fd, const struct sockaddr *address, socklen_t length) {
  const struct sockaddr_un *theirs = (const void *)address;
  struct sockaddr_un ours = {AF_UNIX};
  struct found f;
  begin();
  if (off() || length <= sizeof(sa_family_t) || theirs->sun_family != AF_UNIX || !*theirs->sun_path)
    return (int)syscall(call, fd, address, length);
  char path[sizeof theirs->sun_path + 1] = "", folder[PATH_MAX];
  int at = AT_FDCWD;
  memcpy(path, theirs->sun_path, length - sizeof(sa_family_t));
  const char *place = call == SYS_bind ? to_make(&at, path, &f) : to_read(&at, path, 1, &f);
  if (place == NULL) return call == SYS_bind && errno == EEXIST ? fail(EADDRINUSE) : -1;
  if (place == path || f.kept) return (int)syscall(call, fd, address, length);
  parent_of(place, folder);
  int parent = (int)sys_open(folder, O_PATH | O_CLOEXEC, 0);
  if (snprintf(ours.sun_path, sizeof ours.sun_path, "%s", place) >= (int)sizeof ours.sun_path)
    snprintf(ours.sun_path, sizeof ours.sun_path, "/proc/self/fd/%d/%s", parent, strrchr(place, '/') + 1);
  int done = (int)syscall(call, fd, &ours, sizeof ours);
  int error = errno;
  syscall(SYS_close, parent);
  errno = error;
  return done;
}
EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length) { return with_path(SYS_bind, fd, address, length); }
EXPORT int connect(int fd, const struct sockaddr *address, socklen_t length) { return with_path(SYS_connect, fd, address, length); }
EXPORT int getsockname(int fd, struct sockaddr *address, socklen_t *length) {
  struct sockaddr_un *ours = (void *)address;
  socklen_t room = *length;
  if (syscall(SYS_getsockname, fd, address, length) < 0) return -1;
  if (off() || *length > room || *length <= sizeof(sa_family_t) || ours->sun_family != AF_UNIX) return 0;
  char path[sizeof ours->sun_path + 1] = "";
  memcpy(path, ours->sun_path, *length - sizeof(sa_family_t));
  const char *shown = seen(path);
  if (shown != path) {
    strcpy(ours->sun_path, shown);
    *length = (socklen_t)(sizeof(sa_family_t) + strlen(shown) + 1);
  }
  return 0;
}

/* -- programs ----------------------------------------------------------------------------------- */

/* 1 for a program that would run without this library: it is linked statically, or of 32 bits. */
static int is_static(const char *place) {
  Elf64_Ehdr head;
  int file = (int)sys_open(place, O_RDONLY | O_CLOEXEC, 0), result = 0;
  if (file < 0) return 0;
  if (syscall(SYS_pread64, file, &head, sizeof head, 0) == sizeof head && !memcmp(head.e_ident, ELFMAG, SELFMAG)) {
    result = 1;
    for (int at = 0; at < head.e_phnum && head.e_ident[EI_CLASS] == ELFCLASS64; at++) {
      Elf64_Phdr part;
      off_t offset = head.e_phoff + (off_t)at * head.e_phentsize;
      if (syscall(SYS_pread64, file, &part, sizeof part, offset) == sizeof part && part.p_type == PT_INTERP) result = 0;
    }
  }
  syscall(SYS_close, file);
  return result;
}

/* What a process of this machine needs (session.py); a program may leave it out of an environment. */
static const char *const OURS[] = {
    "LD_PRELOAD=", "TUNER_FILES=", "TUNER_FILES_KEPT=", "TUNER_FILES_HELD=", "TUNER_EMULATOR=",
    "TUNER_EMULATOR_EVENTS=", "TUNER_EMULATOR_LIBRARIES=", "TUNER_EMULATOR_SETTINGS=", "TUNER_EMULATOR_PACKAGE=",
    "TUNER_EMULATOR_OWNER=", "TUNER_EMULATOR_PATH=", "TRITON_LIBCUDA_PATH=", "HF_DEACTIVATE_ASYNC_LOAD="};
#define OUR_COUNT (sizeof OURS / sizeof *OURS)
static char *ours[OUR_COUNT]; /* as they were when this process began */

__attribute__((constructor)) static void remember(void) {
  begin();
  for (size_t n = 0; n < OUR_COUNT && !off(); n++) {
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strlen(OURS[n]) - 1, OURS[n]);
    const char *value = getenv(name);
    if (value && (ours[n] = malloc(strlen(OURS[n]) + strlen(value) + 1))) sprintf(ours[n], "%s%s", OURS[n], value);
  }
}

/* Where a program is, and its environment with this library in it, which the caller frees with
 * `free`; NULL with errno. */
static const char *to_start(const char *path, char *const given[], char ***environment, struct found *f) {
  int fd = AT_FDCWD;
  const char *place = to_read(&fd, path, 1, f);
  *environment = (char **)given;
  if (place == NULL || off()) return place;
  if (!held && is_static(place)) {
    static const char text[] = "tuner: a statically linked program can't be kept apart from your files\n";
    syscall(SYS_write, 2, text, sizeof text - 1);
    return errno = EACCES, NULL;
  }
  size_t count = 0;
  while (given && given[count]) count++;
  char **all = malloc((count + OUR_COUNT + 1) * sizeof *all);
  if (all == NULL) return NULL;
  size_t size = 0;
  for (size_t at = 0; at < count; at++) {
    int is_ours = 0;
    for (size_t n = 0; n < OUR_COUNT; n++) is_ours |= ours[n] && !strncmp(given[at], OURS[n], strlen(OURS[n]));
    if (is_ours && strncmp(given[at], "LD_PRELOAD=", 11) == 0 && strstr(given[at], ours[0] + 11)) {
      all[size++] = given[at]; /* with more than ours */
      continue;
    }
    if (!is_ours) all[size++] = given[at];
  }
  int preloads = 0;
  for (size_t at = 0; at < size; at++) preloads |= !strncmp(all[at], "LD_PRELOAD=", 11);
  for (size_t n = preloads; n < OUR_COUNT; n++)
    if (ours[n]) all[size++] = ours[n];
  all[size] = NULL;
  *environment = all;
  return place;
}

EXPORT int execve(const char *path, char *const words[], char *const given[]) {
  struct found f;
  char **environment;
  const char *place = to_start(path, given, &environment, &f);
  if (place == NULL) return -1;
  syscall(SYS_execve, place, words, environment);
  int error = errno;
  if (environment != given) free(environment);
  return fail(error);
}
EXPORT int execv(const char *path, char *const words[]) { return execve(path, words, environ); }
EXPORT int execvpe(const char *name, char *const words[], char *const given[]) {
  if (strchr(name, '/')) return execve(name, words, given);
  char path[PATH_MAX];
  int denied = 0;
  const char *at = getenv("PATH");
  for (at = at ? at : "/bin:/usr/bin"; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
    int length = (int)strcspn(at, ":");
    if (snprintf(path, sizeof path, "%.*s%s%s", length, at, length ? "/" : "", name) >= PATH_MAX) continue;
    execve(path, words, given);
    if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) return -1;
    denied |= errno == EACCES;
  }
  return fail(denied ? EACCES : ENOENT);
}
EXPORT int execvp(const char *name, char *const words[]) { return execvpe(name, words, environ); }

#define SPAWN(name)                                                                                   \
  EXPORT int name(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,            \
                  const posix_spawnattr_t *how, char *const words[], char *const given[]) {           \
    LATER(int, name, pid_t *, const char *, const posix_spawn_file_actions_t *,                       \
          const posix_spawnattr_t *, char *const[], char *const[]);                                   \
    struct found f;                                                                                   \
    char **environment;                                                                               \
    const char *place = strchr(path, '/') ? to_start(path, given, &environment, &f)                   \
                                          : to_start("/proc/self/exe", given, &environment, &f);      \
    if (place == NULL) return errno;                                                                  \
    int error = later_##name(pid, strchr(path, '/') ? place : path, actions, how, words, environment); \
    if (environment != given) free(environment);                                                      \
    return error;                                                                                     \
  }
SPAWN(posix_spawn)
SPAWN(posix_spawnp)

/* The file is opened here: the new process has no signals when it would. */
EXPORT int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t *actions, int number,
                                            const char *path, int flags, mode_t mode) {
  int fd = open_at(AT_FDCWD, path, flags | O_CLOEXEC, mode);
  return fd < 0 ? errno : posix_spawn_file_actions_adddup2(actions, fd, number);
}

static __thread char loaded[PATH_MAX];
static __attribute__((noinline)) const char *to_load(const char *path) {
  struct found f;
  int fd = AT_FDCWD;
  if (path == NULL || strchr(path, '/') == NULL) return path;
  const char *place = to_read(&fd, path, 1, &f);
  return place == NULL || place == path || f.where != NEW ? path : strcpy(loaded, place);
}
/* A jump to the real function: that looks in the folders of the library that calls it. */
EXPORT __attribute__((optimize("O2"))) void *dlopen(const char *path, int mode) {
  LATER(void *, dlopen, const char *, int);
  return later_dlopen(to_load(path), mode);
}

/* Say why a program ended that had no handler for the trap. */
static pid_t told_of(pid_t pid, int was_trapped) {
  char text[200];
  if (pid > 0 && was_trapped && held) {
    int length = snprintf(text, sizeof text, "tuner: process %d was ended before it changed your files: a program that is"
                          " linked statically, or of 32 bits, can't be kept apart from them\n", pid);
    syscall(SYS_write, 2, text, length);
  }
  return pid;
}
EXPORT pid_t wait4(pid_t pid, int *status, int options, struct rusage *use) {
  int own = 0;
  if (status == NULL) status = &own;
  pid = (pid_t)syscall(SYS_wait4, pid, status, options, use);
  return told_of(pid, pid > 0 && WIFSIGNALED(*status) && WTERMSIG(*status) == SIGSYS);
}
EXPORT pid_t waitpid(pid_t pid, int *status, int options) { return wait4(pid, status, options, NULL); }
EXPORT pid_t wait3(int *status, int options, struct rusage *use) { return wait4(-1, status, options, use); }
EXPORT pid_t wait(int *status) { return wait4(-1, status, 0, NULL); }
EXPORT int waitid(idtype_t type, id_t id, siginfo_t *info, int options) {
  siginfo_t own = {0};
  if (info == NULL) info = &own;
  int failed = (int)syscall(SYS_waitid, type, id, info, options, NULL);
  int ended = !failed && (info->si_code == CLD_KILLED || info->si_code == CLD_DUMPED) && !(options & WNOWAIT);
  told_of(ended ? info->si_pid : 0, ended && info->si_status == SIGSYS);
  return failed;
}

/* -- raw system calls --------------------------------------------------------------------------- */

struct how { uint64_t flags, mode, resolve; }; /* struct open_how of linux/openat2.h */

static long answer(int number, const long *a) {
  const char *p = (const char *)a[0], *q = (const char *)a[1];
  const int here = AT_FDCWD;
  switch (number) {
    case SYS_openat: return open_at(a[0], q, a[2], a[3]);
    case SYS_unlinkat: return remove_at(a[0], q, a[2]);
    case SYS_mkdirat: return mkdirat(a[0], q, a[2]);
    case SYS_symlinkat: return symlinkat(p, a[1], (const char *)a[2]);
    case SYS_linkat: return linkat(a[0], q, a[2], (const char *)a[3], a[4]);
    case SYS_mknodat: return mknodat(a[0], q, a[2], a[3]);
    case SYS_renameat: return rename_at(a[0], q, a[2], (const char *)a[3], 0);
    case SYS_renameat2: return rename_at(a[0], q, a[2], (const char *)a[3], a[4]);
    case SYS_fchmodat: return fchmodat(a[0], q, a[2], 0);
    case FCHMODAT2: return fchmodat(a[0], q, a[2], a[3]);
    case SYS_fchmod: return fchmod(a[0], a[1]);
    case SYS_fchown: return fchown(a[0], a[1], a[2]);
    case SYS_fsetxattr: return fsetxattr(a[0], q, (const void *)a[2], a[3], a[4]);
    case SYS_fremovexattr: return fremovexattr(a[0], q);
    case SYS_fchownat: return fchownat(a[0], q, a[2], a[3], a[4]);
    case SYS_truncate: return truncate(p, a[1]);
    case SYS_utimensat: return set_times(a[0], q, (const void *)a[2], a[3]);
    case SYS_setxattr: return setxattr(p, q, (const void *)a[2], a[3], a[4]);
    case SYS_lsetxattr: return lsetxattr(p, q, (const void *)a[2], a[3], a[4]);
    case SYS_removexattr: return removexattr(p, q);
    case SYS_lremovexattr: return lremovexattr(p, q);
#ifdef SYS_openat2
    case SYS_openat2: {
      const struct how *how = (const void *)a[2];
      return open_at(a[0], q, how->flags, how->mode);
    }
#endif
#ifdef SYS_open
    case SYS_open: return open_at(here, p, a[1], a[2]);
    case SYS_creat: return creat(p, a[1]);
    case SYS_unlink: return remove_at(here, p, 0);
    case SYS_rmdir: return remove_at(here, p, AT_REMOVEDIR);
    case SYS_mkdir: return mkdirat(here, p, a[1]);
    case SYS_symlink: return symlinkat(p, here, q);
    case SYS_link: return linkat(here, p, here, q, 0);
    case SYS_mknod: return mknodat(here, p, a[1], a[2]);
    case SYS_rename: return rename_at(here, p, here, q, 0);
    case SYS_chmod: return chmod(p, a[1]);
    case SYS_chown: return chown(p, a[1], a[2]);
    case SYS_lchown: return lchown(p, a[1], a[2]);
    case SYS_utime: return utime(p, (const void *)a[1]);
    case SYS_utimes: return utimes(p, (const void *)a[1]);
    case SYS_futimesat: return futimesat(a[0], q, (const void *)a[2]);
#endif
    default: return fail(ENOSYS);
  }
}

static void trapped(int signal, siginfo_t *info, void *context) {
  ucontext_t *at = context;
  int before = errno;
#if defined(__x86_64__)
  greg_t *r = at->uc_mcontext.gregs;
  long arguments[] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8]};
#else
  long arguments[5];
  memcpy(arguments, at->uc_mcontext.regs, sizeof arguments);
#endif
  long result = answer(info->si_syscall, arguments);
  if (result < 0) result = -errno;
#if defined(__x86_64__)
  r[REG_RAX] = result;
#else
  at->uc_mcontext.regs[0] = result;
#endif
  errno = before;
}

static int answers_traps;

/* Libraries that tell of crashes, as LLVM does in Triton, ask for every signal that can end a
 * process. This one is ours; they hear that they have it. */
EXPORT int sigaction(int signal, const struct sigaction *how, struct sigaction *before) {
  LATER(int, sigaction, int, const struct sigaction *, struct sigaction *);
  if (!answers_traps || signal != SIGSYS) return later_sigaction(signal, how, before);
  if (before) memset(before, 0, sizeof *before);
  return 0;
}

EXPORT sighandler_t signal(int number, sighandler_t handler) {
  LATER(sighandler_t, signal, int, sighandler_t);
  return answers_traps && number == SIGSYS ? SIG_DFL : later_signal(number, handler);
}

static void answer_traps(void) {
  struct sigaction how = {.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
  how.sa_sigaction = trapped;
  LATER(int, sigaction, int, const struct sigaction *, struct sigaction *);
  later_sigaction(SIGSYS, &how, NULL);
  answers_traps = 1;
}
