/*
 * Recorded cases made for the tests: the oracle's results in a temporary directory, and ways to
 * damage them.
 */
#ifndef ONEBIT_TESTS_SUPPORT_REPLAY_H
#define ONEBIT_TESTS_SUPPORT_REPLAY_H

#include <stddef.h>

/* Room for the path of a file in a temporary directory. */
#define PATH_ROOM 512

/* Makes a directory of its own under $TMPDIR, or /tmp; removes it with the cases in it. */
void scratch_create(char path[PATH_ROOM]);
void scratch_remove(const char *path);

/* path = directory/name */
void path_join(char path[PATH_ROOM], const char *directory, const char *name);

/* Record a case in directory/name, which becomes `path`, as the oracle computes it. */
void record_allreduce(const char *directory, const char *name, int world, size_t count, int steps,
                      char path[PATH_ROOM]);
void record_adam(const char *directory, const char *name, int world, int steps,
                 char path[PATH_ROOM]);
#define RECORDED_SHAPES "513 37x3 1 8 64x40"
#define RECORDED_TOTAL  (513 + 37 * 3 + 1 + 8 + 64 * 40)
#define RECORDED_WARMUP 5

/* The number of values in a file. */
size_t recorded_values(const char *path, const char *file);

/* One value of a file, to be looked at or changed. */
float recorded_value(const char *path, const char *file, size_t index);
void set_recorded_value(const char *path, const char *file, size_t index, float value);

/* Makes a file so many bytes longer, or shorter. */
void lengthen_file(const char *path, const char *file, long bytes);

/* In case.txt: the line of that key becomes `line`; "": it goes. */
void edit_case(const char *path, const char *key, const char *line);

#endif
