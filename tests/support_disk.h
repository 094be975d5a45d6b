/*
 * A simulated disk with faults. At the library's n-th system call on files
 * (optimizers/checkpoint/system.h), the process ends, the power fails, or the call fails.
 */
#ifndef ONEBIT_TESTS_SUPPORT_DISK_H
#define ONEBIT_TESTS_SUPPORT_DISK_H

#include <stdbool.h>

/* Paths of a test. `root` is a temporary directory. It contains `saved`, which a test may create,
 * and `shadow`. */
struct directories {
  char root[64], saved[96], shadow[96];
};

struct directories directories_create(void);
/* Removes the directories. Checks that they contain nothing else. */
void directories_remove(const struct directories *directories);
void directory_empty(const char *path);

/* The names of a directory's files, sorted. */
enum { MAX_NAMES = 64 };
struct names {
  char name[MAX_NAMES][256];
  int count;
};
struct names list_names(const char *path);

enum disk_fault {
  DISK_WELL,      /* no fault: calls are only counted */
  DISK_KILLED,    /* the process ends before the call, or in the middle of it if it writes */
  DISK_CUT,       /* like DISK_KILLED, and all bytes and names that were not synced are lost */
  DISK_CUT_EARLY, /* like DISK_CUT, but removed names stay removed */
  DISK_CUT_LATE,  /* like DISK_CUT_EARLY, but renamed files keep their new names */
  DISK_FULL,      /* the call fails with ENOSPC */
  DISK_BROKEN,    /* this call and all later ones fail with EIO */
  DISK_SLOW       /* calls transfer only a part of their bytes, and some fail with EINTR */
};

/* Injects the fault at call number `at`, counted from now on. The directory `shadow` keeps replaced
 * and removed files, which are restored when the power is cut. If the fault ends the process, the
 * exit status is 9. */
void disk_begin(enum disk_fault fault, long at, const char *shadow);

/* Returns the number of calls so far. */
long disk_calls(void);
void disk_end(void);

/* Objects other than regular files, at the path of a file. A reader must not block on them. */

enum irregular { A_FIFO, A_SOCKET, A_DIRECTORY, A_DEVICE, A_LINK_TO_A_FIFO, IRREGULARS };

extern const char *const irregular_names[IRREGULARS];

/* irregular_make makes an object of that kind at an unused path; irregular_remove removes it. */
void irregular_make(enum irregular kind, const char *path);
void irregular_remove(enum irregular kind, const char *path);

/* The size of a buffer for the path of a file in a temporary directory. */
#define PATH_ROOM 512

/* scratch_create makes a new directory under $TMPDIR, or /tmp. scratch_remove removes it with its
 * contents. */
void scratch_create(char path[PATH_ROOM]);
void scratch_remove(const char *path);

/* Sets path to directory/name. */
void path_join(char path[PATH_ROOM], const char *directory, const char *name);

#endif
