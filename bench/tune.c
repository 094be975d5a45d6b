/* onebit-tune: reads the command line and begins. */
#include <stdio.h>

#include "bench/tune.h"

#ifndef ONEBIT_HAVE_MPI
int tune_run(const struct tune_options *options) {
  (void)options;
  tune_complain("built without MPI (MPI=0): it can only --predict; see --help");
  return TUNE_FAILED;
}
#endif

int main(int argc, char **argv) {
  struct tune_options options;
  bool help;
  char error[256];
  if (!tune_options_parse(argc, argv, &options, &help, error)) {
    tune_complain("%s", error);
    return TUNE_USAGE;
  }
  if (help) {
    tune_print_help();
    return TUNE_OK;
  }
  return options.predict ? tune_predict(&options) : tune_run(&options);
}
