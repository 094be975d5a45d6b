/*
 * A disk with faults: at the n-th of the library's calls that change files
 * (optimizers/checkpoint/system.h) the process ends, or the power fails, or the call fails.
 */
#ifndef ONEBIT_TESTS_SUPPORT_DISK_H
#define ONEBIT_TESTS_SUPPORT_DISK_H

#include <stdbool.h>

/* Paths of a temporary directory, `root`, and in it of `saved`, which a test may create, and of
 * `shadow`. */
struct directories {
  char root[64], saved[96], shadow[96];
};

struct directories directories_create(void);
/* Removes the directories; checks that nothing else is in them. */
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
  DISK_WELL,      /* calls are counted */
  DISK_KILLED,    /* the process ends before the call, or halfway through it when it writes */
  DISK_CUT,       /* likewise; and all that was not synced is lost: bytes, and names */
  DISK_CUT_EARLY, /* likewise; but names that were removed stay removed */
  DISK_CUT_LATE,  /* likewise; and a name that was changed stays changed */
  DISK_FULL,      /* the call fails: ENOSPC */
  DISK_BROKEN,    /* this call and all that follow fail: EIO */
  DISK_SLOW       /* calls transfer a part of their bytes, and some are interrupted */
};

/* Injects the fault at call number `at` from now on. `shadow` is the directory that keeps former
 * files, to be restored when the power is cut. A process that the fault ends has exit status 9. */
void disk_begin(enum disk_fault fault, long at, const char *shadow);

/* Returns the number of calls so far. */
long disk_calls(void);
void disk_end(void);

/* Objects that stand where a file should be; a reader must not wait for them. */

enum irregular { A_FIFO, A_SOCKET, A_DIRECTORY, A_DEVICE, A_LINK_TO_A_FIFO, IRREGULARS };

extern const char *const irregular_names[IRREGULARS];

/* Make an object of that kind at a free path; remove it. */
void irregular_make(enum irregular kind, const char *path);
void irregular_remove(enum irregular kind, const char *path);

/* Room for the path of a file in a temporary directory. */
#define PATH_ROOM 512

/* Makes a directory of its own under $TMPDIR, or /tmp; the other function removes it with its
 * contents. */
void scratch_create(char path[PATH_ROOM]);
void scratch_remove(const char *path);

/* Sets path to directory/name. */
void path_join(char path[PATH_ROOM], const char *directory, const char *name);

#endif
