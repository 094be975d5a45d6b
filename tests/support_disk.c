/* Simulates a disk with faults, and creates FIFOs, sockets and other objects at the paths of
 * files. */
#include "tests/support_disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "optimizers/checkpoint/directory.h"
#include "tests/support.h"

enum { EVENTS = 256, OPEN_FILES = 64, PATH = 256 };

/* A change to a directory since it was last synced, which a power cut undoes. */
enum event_kind { MADE, RENAMED, REMOVED };

struct event {
  enum event_kind kind;
  char path[PATH], to[PATH], former[PATH]; /* former: a link to the file that had the name before;
                                            * "": there was none */
};

/* An open file. `unsynced`: it has bytes that are not synced. */
struct open_file {
  int number; /* 0: none */
  char path[PATH];
  bool unsynced, directory;
};

static struct {
  enum disk_fault fault;
  long at, calls, links;
  char shadow[PATH - 32];
  struct event events[EVENTS];
  int event_count;
  struct open_file files[OPEN_FILES];
  struct ob_system real;
  struct ob_input_calls real_input;
} disk;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void set_path(char to[PATH], const char *path) {
  size_t length = strlen(path);
  if (length >= PATH)
    abort();
  memcpy(to, path, length + 1);
}

static struct open_file *find_open_file(int number) {
  for (int k = 0; k < OPEN_FILES; k++)
    if (disk.files[k].number == number)
      return &disk.files[k];
  return NULL;
}

/* Stores the path of the file `name` in the open directory `directory`. If that is AT_FDCWD, `name`
 * is the path. */
static void find_path(char to[PATH], int directory, const char *name) {
  const struct open_file *file = directory == AT_FDCWD ? NULL : find_open_file(directory);
  if (snprintf(to, PATH, "%s%s%s", file ? file->path : "", file ? "/" : "", name) >= PATH ||
      (!file && directory != AT_FDCWD))
    abort();
}

/* Keeps the file at `path` by a hard link in the shadow directory. */
static void keep_former_file(struct event *event, const char *path) {
  snprintf(event->former, sizeof event->former, "%s/%ld", disk.shadow, disk.links++);
  if (link(path, event->former) != 0)
    event->former[0] = 0;
}

static struct event *add_event(enum event_kind kind, const char *path) {
  struct event *event = &disk.events[disk.event_count];
  disk.event_count += disk.event_count + 1 < EVENTS;
  event->kind = kind;
  event->former[0] = 0;
  set_path(event->path, path);
  return event;
}

static void undo_event(const struct event *event) {
  switch (event->kind) {
  case MADE:
    unlink(event->path);
    break;
  case RENAMED:
    if (disk.fault == DISK_CUT_LATE)
      break;
    rename(event->to, event->path);
    if (event->former[0])
      (void)!link(event->former, event->to);
    break;
  case REMOVED:
    if (disk.fault == DISK_CUT && event->former[0])
      (void)!link(event->former, event->path);
  }
}

/* Cuts the power: bytes and names that were not synced are lost. */
static void cut_power(void) {
  for (int k = 0; k < OPEN_FILES; k++)
    if (disk.files[k].number && disk.files[k].unsynced)
      (void)!truncate(disk.files[k].path, 100);
  while (disk.event_count-- > 0)
    undo_event(&disk.events[disk.event_count]);
}

/* Counts a call, and injects the fault if it is due. If the call must fail, sets errno and returns
 * true. */
static bool inject_fault(void) {
  bool now = ++disk.calls == disk.at;
  switch (disk.fault) {
  case DISK_KILLED:
    if (now)
      _exit(9);
    return false;
  case DISK_CUT:
  case DISK_CUT_EARLY:
  case DISK_CUT_LATE:
    if (now)
      cut_power();
    if (now)
      _exit(9);
    return false;
  case DISK_FULL:
    errno = ENOSPC;
    return now;
  case DISK_BROKEN:
    errno = EIO;
    return disk.calls >= disk.at;
  default:
    return false;
  }
}

static void note_open(const char *path, int number, int flags, bool made) {
  struct open_file *file = find_open_file(0);
  if (number < 0 || !file)
    return;
  *file = (struct open_file){.number = number, .directory = flags & O_DIRECTORY};
  set_path(file->path, path);
  if (made)
    add_event(MADE, path);
}

static int open_disk(int directory, const char *name, int flags, mode_t mode) {
  int number = -1;
  char path[PATH];
  pthread_mutex_lock(&lock);
  find_path(path, directory, name);
  if (!inject_fault()) {
    bool made = flags & O_CREAT && access(path, F_OK) != 0;
    number = disk.real.open(directory, name, flags, mode);
    note_open(path, number, flags, made && number >= 0);
  }
  pthread_mutex_unlock(&lock);
  return number;
}

static int open_to_read(int directory, const char *name, int flags) {
  int number = -1;
  pthread_mutex_lock(&lock);
  if (!inject_fault())
    number = disk.real_input.open(directory, name, flags);
  pthread_mutex_unlock(&lock);
  return number;
}

static ssize_t read_disk(int number, void *to, size_t bytes, off_t offset) {
  ssize_t some = -1;
  pthread_mutex_lock(&lock);
  if (inject_fault()) {
  } else if (disk.fault == DISK_SLOW && disk.calls % 3 == 0) {
    errno = EINTR;
  } else {
    some =
        disk.real_input.read(number, to, disk.fault == DISK_SLOW ? bytes / 2 + 1 : bytes, offset);
  }
  pthread_mutex_unlock(&lock);
  return some;
}

/* Writes to a file. If the fault ends the process in this write, only the first half of the bytes
 * gets to the disk. */
static ssize_t write_disk(int number, const void *data, size_t bytes, off_t offset) {
  ssize_t written = -1;
  pthread_mutex_lock(&lock);
  bool ends = disk.fault >= DISK_KILLED && disk.fault <= DISK_CUT_LATE;
  struct open_file *file = find_open_file(number);
  if (file)
    file->unsynced = true;
  if (ends && disk.calls + 1 == disk.at)
    (void)!disk.real.pwrite(number, data, bytes / 2, offset);
  if (inject_fault()) {
  } else if (disk.fault == DISK_SLOW && disk.calls % 3 == 0) {
    errno = EINTR;
  } else {
    size_t some = disk.fault == DISK_SLOW && bytes > 1 ? bytes / 2 + 1 : bytes;
    written = disk.real.pwrite(number, data, some, offset);
  }
  pthread_mutex_unlock(&lock);
  return written;
}

static int sync_disk(int number) {
  int result = -1;
  pthread_mutex_lock(&lock);
  if (inject_fault()) {
  } else if (disk.fault == DISK_SLOW && disk.calls % 2 == 0) {
    errno = EINTR;
  } else {
    struct open_file *file = find_open_file(number);
    result = disk.real.fsync(number);
    if (file && file->directory)
      disk.event_count = 0;
    if (file)
      file->unsynced = false;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* Closes a file, but still records whether it is synced: if not, it loses its bytes when the power
 * is cut. */
static int close_disk(int number) {
  pthread_mutex_lock(&lock);
  bool fails = inject_fault();
  int why = errno;
  struct open_file *file = find_open_file(number);
  int result = disk.real.close(number);
  if (file && file->unsynced)
    file->number = -2 - number;
  else if (file)
    file->number = 0;
  pthread_mutex_unlock(&lock);
  if (fails)
    errno = why;
  return fails ? -1 : result;
}

static int rename_disk(int directory, const char *from, const char *to) {
  int result = -1;
  char before[PATH];
  pthread_mutex_lock(&lock);
  find_path(before, directory, from);
  if (!inject_fault()) {
    struct event *event = add_event(RENAMED, before);
    find_path(event->to, directory, to);
    keep_former_file(event, event->to);
    result = disk.real.rename(directory, from, to);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int unlink_disk(int directory, const char *name) {
  int result = -1;
  char path[PATH];
  pthread_mutex_lock(&lock);
  find_path(path, directory, name);
  if (!inject_fault()) {
    keep_former_file(add_event(REMOVED, path), path);
    result = disk.real.unlink(directory, name);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int mkdir_disk(const char *path, mode_t mode) {
  int result = -1;
  pthread_mutex_lock(&lock);
  if (!inject_fault())
    result = disk.real.mkdir(path, mode);
  pthread_mutex_unlock(&lock);
  return result;
}

void disk_begin(enum disk_fault fault, long at, const char *shadow) {
  disk.real = ob_system;
  disk.real_input = ob_input_calls;
  disk.fault = fault;
  disk.at = at;
  disk.calls = 0;
  disk.event_count = 0;
  memset(disk.files, 0, sizeof disk.files);
  snprintf(disk.shadow, sizeof disk.shadow, "%s", shadow);
  ob_system = (struct ob_system){.open = open_disk,
                                 .pwrite = write_disk,
                                 .fsync = sync_disk,
                                 .close = close_disk,
                                 .rename = rename_disk,
                                 .unlink = unlink_disk,
                                 .mkdir = mkdir_disk};
  ob_input_calls = (struct ob_input_calls){.open = open_to_read, .read = read_disk};
}

long disk_calls(void) { return disk.calls; }

void disk_end(void) {
  ob_system = disk.real;
  ob_input_calls = disk.real_input;
}

/* --- Directories */

struct directories directories_create(void) {
  struct directories directories = {.root = "/tmp/onebit-checkpoint-XXXXXX"};
  CHECK(mkdtemp(directories.root), "no directory for files");
  snprintf(directories.saved, sizeof directories.saved, "%s/saved", directories.root);
  snprintf(directories.shadow, sizeof directories.shadow, "%s/shadow", directories.root);
  mkdir(directories.shadow, 0700);
  return directories;
}

void directory_empty(const char *path) {
  struct names names = list_names(path);
  char file[512];
  for (int k = 0; k < names.count; k++) {
    snprintf(file, sizeof file, "%s/%s", path, names.name[k]);
    unlink(file);
  }
}

void directories_remove(const struct directories *directories) {
  directory_empty(directories->saved);
  directory_empty(directories->shadow);
  rmdir(directories->saved);
  rmdir(directories->shadow);
  CHECK(rmdir(directories->root) == 0, "files are left in %s", directories->root);
}

static int compare_names(const void *a, const void *b) { return strcmp(a, b); }

struct names list_names(const char *path) {
  struct names names = {.count = 0};
  DIR *list = opendir(path);
  for (const struct dirent *entry; list && (entry = readdir(list)) != NULL;)
    if (entry->d_name[0] != '.' && names.count < MAX_NAMES)
      snprintf(names.name[names.count++], sizeof names.name[0], "%s", entry->d_name);
  if (list)
    closedir(list);
  qsort(names.name, (size_t)names.count, sizeof names.name[0], compare_names);
  return names;
}

/* ---- Objects of other types at the path of a file ---- */

const char *const irregular_names[IRREGULARS] = {"FIFO", "socket", "directory", "device",
                                                 "link to a FIFO"};

static int bind_socket(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int made = socket(AF_UNIX, SOCK_STREAM, 0), result = -1;
  if (strlen(path) < sizeof address.sun_path) {
    memcpy(address.sun_path, path, strlen(path) + 1);
    result = bind(made, (const void *)&address, sizeof address);
  }
  close(made);
  return result;
}

static void target_path(char target[512], const char *path) {
  snprintf(target, 512, "%s.target", path);
}

void irregular_make(enum irregular kind, const char *path) {
  char target[512];
  int result = -1;
  target_path(target, path);
  switch (kind) {
  case A_FIFO:
    result = mkfifo(path, 0600);
    break;
  case A_SOCKET:
    result = bind_socket(path);
    break;
  case A_DIRECTORY:
    result = mkdir(path, 0700);
    break;
  case A_DEVICE:
    result = symlink("/dev/zero", path);
    break;
  default:
    result = mkfifo(target, 0600) || symlink(target, path);
  }
  CHECK(result == 0, "no %s could be made at %s", irregular_names[kind], path);
}

void irregular_remove(enum irregular kind, const char *path) {
  char target[512];
  target_path(target, path);
  if (kind == A_LINK_TO_A_FIFO)
    unlink(target);
  CHECK((kind == A_DIRECTORY ? rmdir(path) : unlink(path)) == 0, "%s is not there", path);
}

/* ---- A directory for the files that a test writes ---- */

void scratch_create(char path[PATH_ROOM]) {
  const char *parent = getenv("TMPDIR");
  path_join(path, parent && *parent ? parent : "/tmp", "onebit-test-XXXXXX");
  cr_assert(mkdtemp(path), "%s: cannot be made", path);
}

static int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *place) {
  (void)facts;
  (void)type;
  (void)place;
  return remove(path);
}

void scratch_remove(const char *path) { nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS); }

void path_join(char path[PATH_ROOM], const char *directory, const char *name) {
  int length = snprintf(path, PATH_ROOM, "%s/%s", directory, name);
  cr_assert(length < PATH_ROOM, "%s/%s is too long", directory, name);
}
