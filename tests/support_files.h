/* Functions that save optimizers' checkpoints to a directory and load them, on all ranks of a
 * group. */
#ifndef ONEBIT_TESTS_SUPPORT_FILES_H
#define ONEBIT_TESTS_SUPPORT_FILES_H

#include "tests/support_checkpoint.h"
#include "tests/support_disk.h"

enum { FILES_RANKS = 8 };

struct files_run {
  const struct checkpoint_case *what;
  int steps;                     /* saves at this step; 0: loads instead */
  const char *path[FILES_RANKS]; /* each rank's directory; NULL: directories.saved */
  struct saved_parts *parts;     /* NULL, or the struct that receives the ranks' states
                                  * afterwards */
  onebit_status_t status[FILES_RANKS];
  char words[FILES_RANKS][256];
  bool unchanged[FILES_RANKS]; /* true if the state is the same before and after */
};

/* The directories of a test. files_begin creates them. files_end removes them, and makes the test
 * fail if a check has failed. */
extern struct directories directories;
void files_begin(void);
void files_end(void);

/* run_files saves or loads on all ranks as the struct says. save_files and load_files do so with
 * directories.saved and without parts. */
void run_files(struct files_run *run);
struct files_run save_files(const struct checkpoint_case *what, int steps);
struct files_run load_files(const struct checkpoint_case *what);

/* Check that one rank, or all ranks, ended with `status` and a message that contains `words`. After
 * an error the state must be unchanged. */
void expect_rank(const struct files_run *run, int rank, onebit_status_t status, const char *words);
void expect_all(const struct files_run *run, onebit_status_t status, const char *words);

/* Saves a checkpoint, and checks that this succeeds. */
void save_checkpoint(const struct checkpoint_case *what, int steps);

/* Sets `path` to the path of a file in the directory. */
void file_path(char path[256], const char *name);

#endif
