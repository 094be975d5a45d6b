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

/* Sets path to directory/name. */
void path_join(char path[PATH_ROOM], const char *directory, const char *name);

/* Record a case, computed by the oracle, in directory/name, and set `path` to that. */
void record_allreduce(const char *directory, const char *name, int world, size_t count, int steps,
                      char path[PATH_ROOM]);
void record_adam(const char *directory, const char *name, int world, int steps,
                 char path[PATH_ROOM]);
#define RECORDED_SHAPES "513 37x3 1 8 64x40"
#define RECORDED_TOTAL  (513 + 37 * 3 + 1 + 8 + 64 * 40)
#define RECORDED_WARMUP 5

/* Read or change one value of a file. */
float recorded_value(const char *path, const char *file, size_t index);
void set_recorded_value(const char *path, const char *file, size_t index, float value);

/* Makes a file longer by `bytes`, or shorter if they are negative. */
void lengthen_file(const char *path, const char *file, long bytes);

#endif
