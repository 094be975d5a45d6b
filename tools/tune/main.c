/* onebit-tune: reads the command line and begins. */
#include <stdio.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>

static int run_doctor(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  (void)argc, (void)argv;
  int status = doctor_run();
  MPI_Finalize();
  return status;
}
#else
static int refuse(void) {
  tune_complain("built without MPI (MPI=0): it can only --predict; see --help");
  return TUNE_FAILED;
}

int tune_run(const struct tune_options *options) {
  (void)options;
  return refuse();
}

static int run_doctor(int argc, char **argv) {
  (void)argc, (void)argv;
  return refuse();
}
#endif

int main(int argc, char **argv) {
  struct tune_options options;
  bool help;
  char error[256];
  if (argc > 1 && strcmp(argv[1], "--doctor") == 0)
    return run_doctor(argc - 2, argv + 2);
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
