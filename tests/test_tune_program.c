/* Tests the program onebit-tune, without MPI: its predictions, its file, and the arguments that it
 * refuses. */
#include "tests/support.h"
#include "tools/tune/model.h"
#include "tools/tune/tune.h"

static void ignore_tuning_file(void) { setenv("ONEBIT_TUNING", "none", 1); }
TestSuite(tune_program, .init = ignore_tuning_file, .timeout = 60);

Test(tune_program, writes_a_file_and_its_directories) {
  char directory[] = "/tmp/onebit-tune-XXXXXX", path[128];
  static const char *const hosts[] = {"node1"};
  static const struct ob_tuning_origin origin = {"2026-11-21", "Some MPI", hosts, 1};
  static const struct ob_tuning_here here = {"node1", "avx2"};
  struct ob_costs costs, read;
  ob_costs_default("avx2", &costs);
  cr_assert(mkdtemp(directory));
  costs.hosts = 1;
  snprintf(path, sizeof path, "%s/a/b/tuning", directory);
  cr_expect(tune_can_write(path) && rmdir(directory) == 0, "a check leaves no directory");
  cr_expect(tune_write_file(path, &costs, &origin));
  cr_expect(tune_write_file(path, &costs, &origin), "it replaces what is there");
  cr_expect_eq(ob_tuning_read(path, &here, &read, NULL), OB_TUNING_READ, "%s", read.source);
  cr_expect(!tune_write_file(directory, &costs, &origin), "a directory is no file");
  cr_expect(tune_can_write(path) && !tune_can_write(directory));
  cr_expect_eq(remove(path), 0);
  for (int k = 0; k < 3; k++) { /* removes a/b, a and the directory, which must be empty */
    *strrchr(path, '/') = '\0';
    cr_expect_eq(rmdir(path), 0, "%s", path);
  }
}

#define PREDICT "onebit-tune --predict --parameters 340M --hosts 16 --ranks-per-host 8 "

Test(tune_program, predicts) {
  const char *said = program(0, PREDICT "--compute 0.250 --bandwidth 1gbit --latency 50us");
  for (int m = 0; m < TUNE_METHODS; m++)
    expect_output(said, tune_method_names[m]);
  expect_output(said, "941 Mbit/s of payload");
  said = program(0, "onebit-tune --predict --parameters 340M --hosts 16 --compute 0.250 "
                    "--bandwidth 2000gbit --latency 20us --tuning none");
  expect_output(said, "1.88 Tbit/s of payload");
  expect_output(program(0, PREDICT "--compute 250ms --json"), "\"break_even_bits_per_s\"");
  /* Open MPI's best algorithm was measured to take this long on such a network. */
  said = program(0, "onebit-tune --predict --parameters 4M --hosts 4 --compute 1 --tuning none");
  expect_output(said, "reaches 0.93 of the link");
  cr_expect(!strstr(said, tune_method_names[TUNE_HIERARCHICAL]), "it is the flat one: %s", said);
  expect_output(said, "each rank has a core of its own");
  cr_expect(!strstr(said, "RDMA"), "a gigabit link: %s", said);
  said = program(0, "onebit-tune --predict --parameters 4M --hosts 4 --compute 1 --tuning none "
                    "--bandwidth 100gbit");
  expect_output(said, "RDMA makes dense sums faster");
  expect_output(program(1, PREDICT "--compute 1 --tuning /nowhere"), "--tuning: /nowhere does not");
  said = program(0, PREDICT "--compute 1 --shared-cores 32");
  expect_output(said, "32 in all, which the hosts share because they are one machine");
  expect_output(said, "take 4.00 times as long");
  expect_output(program(0, PREDICT "--compute 1 --cores 2 --json"), "\"core_sharing\": 4,");
}

/* Without a given link, --whole-run prints all usual links, and with a link it prints all methods.
 * Each option must have its effect. */
Test(tune_program, predicts_a_whole_run) {
  const char *said = program(0, PREDICT "--compute 0.5 --latency 40ms --whole-run");
  static const char *const links[] = {"10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"};
  for (size_t k = 0; k < sizeof links / sizeof links[0]; k++)
    expect_output(said, links[k]);
  expect_output(said, "outer step");
  said = program(0, PREDICT "--compute 0.5 --bandwidth 10mbit --whole-run --local-steps 50 "
                            "--bits 2 --fragments 5 --delay 10");
  expect_output(said, "   50        2   5     10");
  expect_output(said, "<- chosen");
  expect_output(said, "SparseLoCo");
  expect_output(said, "40 steps are Efficient-Adam's warm-up");
  said = program(0, PREDICT "--compute 0.5 --bandwidth 10mbit --whole-run --bits sparse --json");
  expect_output(said, "\"bits\": \"sparse\"");
  cr_expect(!strstr(said, "nan") && !strstr(said, "inf"), "%s", said);
  said = program(2, PREDICT "--compute 1 --whole-run --local-steps 10 --fragments 4 --delay 3");
  expect_output(said, "exchanges would pile up");
  expect_output(program(2, PREDICT "--compute 1 --whole-run --bits 3"), "--bits=3: expected");
}

#define PREDICT_CARDS "onebit-tune --predict --device cuda --parameters 340M --compute 0.1 "

/* On a slow network compression pays, and over NVLink it does not. The summary says so in both
 * cases. */
Test(tune_program, predicts_for_gpus) {
  const char *said = program(0, PREDICT_CARDS "--hosts 2 --ranks-per-host 8");
  static const enum tune_method methods[] = {TUNE_DENSE,        TUNE_HALF,     TUNE_FLAT,
                                             TUNE_HIERARCHICAL, TUNE_ZERO_ONE, TUNE_STAGED,
                                             TUNE_STAGED_SHARES};
  for (size_t k = 0; k < sizeof methods / sizeof methods[0]; k++)
    expect_output(said, tune_method_names[methods[k]]);
  expect_output(said, "Counted from the source, not measured");
  expect_output(said, "One host, 8 GPUs");
  expect_output(said, "does not pay here");
  expect_output(said, "links of 9.41 Gbit/s");
  expect_output(said, "Compression pays: ");
  expect_output(said, "links of 94.1 Gbit/s");
  said = program(0, PREDICT_CARDS "--hosts 2 --bandwidth 1gbit --latency 1ms --json");
  expect_output(said, "\"hosts\": 2, \"payload_bits_per_s\": 941");
  cr_expect(!strstr(said, "\"hosts\": 1,"), "a host of one GPU: %s", said);
  cr_expect(!strstr(said, "nan") && !strstr(said, "inf"), "%s", said);
  said = program(0, PREDICT_CARDS "--hosts 1 --nvlink-rate 64G --copy-rate 1500G "
                                  "--pcie-rate 50G --memory-rate 600G");
  expect_output(said, "50 GB/s; processors move 600 GB/s");
  expect_output(said, "1.5 TB/s");
  expect_output(said, "64 GB/s");
}

/* A prediction takes the hosts, ranks and link from the tuning file, but does not apply the file's
 * measured corrections. */
Test(tune_program, predicts_without_corrections) {
  char path[] = "/tmp/onebit-tune-XXXXXX", command[256], plain[4096];
  static const char *const hosts[] = {"node1"};
  static const struct ob_tuning_origin origin = {"2026-11-21", "Some MPI", hosts, 1};
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  close(mkstemp(path));
  costs.hosts = 16;
  costs.ranks_per_host = 8;
  snprintf(command, sizeof command, PREDICT "--compute 1 --json --tuning %s", path);
  cr_assert(tune_write_file(path, &costs, &origin));
  snprintf(plain, sizeof plain, "%s", program(0, "%s", command));
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    ob_cost_add_point(&costs.measured.factor[k], 1e6, 7);
  cr_assert(tune_write_file(path, &costs, &origin));
  cr_expect_str_eq(program(0, "%s", command), plain);
  remove(path);
}

/* A tuning file of a single host has no measurements between hosts, so predictions must use default
 * costs between hosts, whatever the fit has computed. */
Test(tune_program, predicts_between_hosts_by_defaults_where_one_was_measured) {
  char path[] = "/tmp/onebit-tune-XXXXXX", plain[4096];
  static const char *const hosts[] = {"node1"};
  static const struct ob_tuning_origin origin = {"2026-11-21", "Some MPI", hosts, 1};
  struct ob_costs costs;
  ob_costs_default("avx2", &costs);
  close(mkstemp(path));
  costs.hosts = costs.ranks_per_host = 1;
  cr_assert(tune_write_file(path, &costs, &origin));
  snprintf(plain, sizeof plain, "%s", program(0, PREDICT "--compute 1 --tuning %s", path));
  cr_expect(strstr(plain, "; for links between hosts, which it has not measured, the defaults"),
            "%s", plain);
  costs.mpi_efficiency = costs.exchange_efficiency = 0.2;
  costs.between.bandwidth /= 9;
  cr_assert(tune_write_file(path, &costs, &origin));
  cr_expect_str_eq(program(0, PREDICT "--compute 1 --tuning %s", path), plain);
  remove(path);
}

#define PREDICT_ONE "--predict --parameters 3M --hosts 2 --compute 1 "

Test(tune_program, says_what_is_wrong_in_a_command_line) {
  expect_output(program(0, "onebit-tune --help"), "usage: mpirun");
  expect_output(program(2, "onebit-tune --predict"), "--predict needs --parameters");
  expect_output(program(2, PREDICT), "--predict needs --compute");
  expect_output(program(2, PREDICT "--compute soon"), "--compute=soon: expected a time such as");
  expect_output(program(2, PREDICT "--compute 1 --bandwidth 5"),
                "--bandwidth=5: expected a rate such as");
  expect_output(program(2, PREDICT "--compute 1 --hosts 2.5"),
                "--hosts=2.5: expected an integer from 1 to 1000000");
  expect_output(program(2, PREDICT "--compute 1 --hosts 0"), "--hosts=0: expected an integer");
  expect_output(program(2, PREDICT "--compute"), "--compute: needs a value");
  expect_output(program(2, "onebit-tune --abacus"), "--abacus: unknown option");
}

/* An option that the selected mode would not use is refused, whatever its value and position
 * are. */
Test(tune_program, refuses_options_of_another_mode) {
  static const char *const rows[][2] = {
      {"--parameters 3M", "--parameters: is for --predict, not for measuring"},
      {"--cores=4", "--cores: is for --predict, not for measuring"},
      {"--device cuda", "--device: is for --predict, not for measuring"},
      {"--doctor --dry-run", "--dry-run: is for measuring, not for --doctor"},
      {"--json --doctor", "--json: is for --predict, not for --doctor"},
      {"--doctor --predict", "--doctor cannot be combined with --predict"},
      {PREDICT_ONE "--dry-run", "--dry-run: is for measuring, not for --predict"},
      {PREDICT_ONE "--delay 3", "--delay: is for --whole-run, not for --predict"},
      {PREDICT_ONE "--nvlink-rate=1G", "--nvlink-rate: is for --device cuda, not for --predict"},
      {PREDICT_ONE "--whole-run --warm-up 0.1", "--warm-up: is for --predict, not for --whole-run"},
      {PREDICT_ONE "--device cuda --shared-cores 4", "is for --predict, not for --device cuda"},
      {PREDICT_ONE "--whole-run --device cuda", "is for --predict, not for --device cuda"}};
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
    expect_output(program(2, "onebit-tune %s", rows[k][0]), rows[k][1]);
}
