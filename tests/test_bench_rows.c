/* Tests the rows that the benchmark program prints, and the dense optimizers that are its
 * baselines. */
#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h> /* tells whether the device is emulated */
#endif

#include "bench/bench_collective.h"
#include "bench/bench_passes.h"
#include "compression/codec.h"
#include "tests/support.h"

#define RANKS 3

Test(bench_rows, overlap_is_what_the_computation_hides) {
  cr_expect_eq(bench_overlap_percent(10, 10, 10), 100);
  cr_expect_eq(bench_overlap_percent(15, 10, 10), 50);
  cr_expect_eq(bench_overlap_percent(30, 10, 10), 0);
}

Test(bench_rows, bandwidths_are_of_the_larger_buffer) {
  struct bench_team team = {.size = 4};
  struct bench_case test = {.team = &team,
                            .collective = &bench_collectives[ONEBIT_ALLREDUCE],
                            .send_count = 250000000,
                            .receive_count = 250000000};
  cr_expect_float_eq(bench_algbw(&test, 0.5), 2, 1e-12);
  cr_expect_float_eq(bench_busbw(&test, 0.5), 3, 1e-12);
  test.collective = &bench_collectives[ONEBIT_ALLGATHER];
  test.send_count /= 4;
  cr_expect_float_eq(bench_algbw(&test, 0.5), 2, 1e-12);
  cr_expect_float_eq(bench_busbw(&test, 0.5), 1.5, 1e-12);
}

/* --- JSON lines */

/* Returns the number of lines. Each line must be a JSON object with these fields. */
static size_t count_objects(const char *text, const char *const *fields) {
  static char line[1 << 12];
  size_t lines = 0;
  for (size_t length; *text; text += length + (text[length] == '\n'), lines++) {
    length = strcspn(text, "\n");
    snprintf(line, sizeof line, "%.*s", (int)length, text);
    cr_assert(json_is_valid(line), "no object on a line: %s", line);
    for (size_t k = 0; fields[k]; k++)
      cr_expect(strstr(line, fields[k]), "%s is not there", fields[k]);
  }
  return lines;
}

static const char *const common_fields[] = {"\"bytes\":",
                                            "\"ranks\":2",
                                            "\"hosts\":",
                                            "\"ranks_per_host\":",
                                            "\"schedule\":\"",
                                            "\"wire\":\"",
                                            "\"dtype\":\"",
                                            "\"codec\":\"",
                                            "\"chunk_elements\":",
                                            "\"transport\":\"",
                                            "\"iterations\":3",
                                            "\"average_us\":",
                                            "\"median_us\":",
                                            "\"minimum_us\":",
                                            "\"p90_us\":",
                                            "\"p99_us\":",
                                            "\"maximum_us\":",
                                            "\"wire_bytes\":",
                                            "\"algbw_gbs\":",
                                            "\"busbw_gbs\":",
                                            "\"dense_median_us\":",
                                            "\"speedup\":",
                                            NULL};

Test(bench_rows, json_has_an_object_a_line) {
  const char *text =
      program(0, "onebit-bench allreduce --ranks 2 -m4K:16K -i3 -x1 --json 2>/dev/null");
  cr_expect_eq(count_objects(text, common_fields), 3);
  cr_expect(strstr(text, "{\"benchmark\":\"allreduce\",\"bytes\":4096,") == text, "%s", text);
  cr_expect(strstr(text, "\"dense_median_us\":null"));
}

/* At 8 Mbit/s a byte takes a microsecond. The headers of TCP and Ethernet count as well. */
Test(bench_rows, limits_are_of_the_wire_and_the_cores) {
  static const char *const fields[] = {
      "\"wire_limit_us\":", "\"codec_limit_us\":", "\"of_limit\":", NULL};
  const char *text = program(0, "onebit-bench allreduce --ranks 2 -m1M:1M -i3 -x1 --json "
                                "--rate=8mbit --cores=1 --schedule=exchange 2>/dev/null");
  double bytes, wire, codec, of;
  cr_expect_eq(count_objects(text, fields), 1);
  cr_assert_eq(sscanf(strstr(text, "\"wire_bytes\":"), "\"wire_bytes\":%lf", &bytes), 1);
  cr_assert_eq(sscanf(strstr(text, "\"wire_limit_us\":"), "\"wire_limit_us\":%lf", &wire), 1);
  cr_assert_eq(sscanf(strstr(text, "\"codec_limit_us\":"), "\"codec_limit_us\":%lf", &codec), 1);
  cr_assert_eq(sscanf(strstr(text, "\"of_limit\":"), "\"of_limit\":%lf", &of), 1);
  cr_expect_float_eq(wire, bytes * 1538 / 1448, 1);
  cr_expect(codec > 0 && codec < wire && of > 0, "%s", text);
}

Test(bench_rows, json_compares_a_line_each) {
  static const char *const fields[] = {"\"requested\":\"", "\"of_best\":", "\"right\":true", NULL};
  const char *text = program(0, "onebit-bench allreduce --ranks 2 -m4K:4K -i3 -x1 -c --json "
                                "--compare=automatic,exchange,exchange:dense 2>/dev/null");
  cr_expect_eq(count_objects(text, common_fields), 3);
  cr_expect_eq(count_objects(text, fields), 3);
  cr_expect(strstr(text, "\"requested\":\"exchange:dense\""));
}

Test(bench_rows, json_of_nonblocking_collectives) {
  static const char *const fields[] = {"\"overall_us\":",      "\"compute_us\":", "\"pure_us\":",
                                       "\"overlap_percent\":", "\"tests\":2",     NULL};
  static const char *const names[] = {"iallreduce", "iallgather", "ireduce-scatter"};
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
    const char *text =
        program(0, "onebit-bench %s --ranks 2 -m4K:8K -i3 -x1 -t2 -c --json 2>/dev/null", names[k]);
    cr_expect_eq(count_objects(text, fields), 2, "%s", names[k]);
    cr_expect_eq(count_objects(text, common_fields), 2, "%s", names[k]);
  }
}

/* The rows of a table have as many columns as the table's heading. */
Test(bench_rows, tables_have_as_many_columns_as_heads) {
  char *text = (char *)(uintptr_t)program(0, "onebit-bench allreduce --ranks 2 -m4K:4K -i3 -f -c "
                                             "--compare=automatic,exchange 2>/dev/null");
  size_t head = 0, lines = 0, columns;
  for (char *rest, *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    bool is_head = strncmp(line, "# Size  ", 8) == 0;
    columns = 0;
    for (char *c = line + 2; *c; c++) /* words separated by a single space are one column */
      columns += *c != ' ' && c[-1] == ' ' && (c == line + 2 || c[-2] == ' ');
    head = is_head ? columns : head;
    lines += line[0] != '#';
    cr_expect(line[0] == '#' || columns + 1 == head, "%s", line);
  }
  cr_expect_eq(lines, 2);
}

/* --- On a device, which may be emulated; times are not tested */

#ifndef ONEBIT_HAVE_CUDA

/* 1-bit Adam's memory consists of two copies of the worker and server residuals, the frozen
 * variance, and messages. */
Test(bench_rows, optimizers_have_a_line_each) {
  static const char *const names[] = {"\nEfficient-Adam ",
                                      "\nLion ",
                                      "\n1-bit Adam ",
                                      "\n1-bit LAMB ",
                                      "\n0/1 Adam, bits ",
                                      "\n0/1 Adam, local step ",
                                      "\n0/1 Adam, synchronisation ",
                                      "\n1-bit momentum SGD ",
                                      " of dense ",
                                      " 33.40\n"};
  const char *said = program(0, "onebit-bench optimizers -m64K -i3 -x0 2>/dev/null");
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
    expect_output(said, names[k]);
  cr_expect(!strstr(said, "nan") && !strstr(said, "inf"), "%s", said);
}

Test(bench_rows, an_optimizer_that_refuses_the_options_is_left_out) {
  const char *said = program(0, "onebit-bench optimizers -m64K -i1 -x0 --residual-copies 1 2>&1");
  expect_output(said, "onebit-bench: 1-bit LAMB: residual_copies is 1");
  expect_output(said, "\n1-bit Adam ");
  cr_expect(!strstr(said, "\n1-bit LAMB "), "%s", said);
}

Test(bench_rows, a_build_without_cuda_exits_with_2) {
  expect_output(program(2, "onebit-bench codec -d cuda"), "built without CUDA");
}

#elif defined ONEBIT_EMULATED_CUDA

Test(bench_rows, json_of_kernels) {
  static const char *const fields[] = {"\"emulated\":true",
                                       "\"bytes\":65536",
                                       "\"row\":\"",
                                       "\"members\":",
                                       "\"median_us\":",
                                       "\"gelements_per_s\":",
                                       "\"bytes_per_element\":",
                                       "\"gbs\":",
                                       "\"of_copy\":",
                                       NULL};
  const char *said = program(0, "onebit-bench codec -d cuda -m64K -i3 -x0 --json 2>/dev/null");
  cr_expect_eq(count_objects(said, fields), 1 + 4 + 4 + 1 + 4 + 2 + 3 + 4 + 1 + 1 + 15);
}

Test(bench_rows, json_of_steps_on_a_device) {
  static const char *const fields[] = {"\"emulated\":true",
                                       "\"optimizer\":\"",
                                       "\"median_us\":",
                                       "\"of_dense\":",
                                       "\"memory_bytes_per_parameter\":",
                                       NULL};
  const char *said = program(0, "onebit-bench optimizers -d cuda -m64K -i3 -x0 --json 2>/dev/null");
  cr_expect_eq(count_objects(said, fields), 8);
  said = program(2, "onebit-bench optimizers -d cuda -m64K -i1 -x0 --bits 8 2>&1");
  expect_output(said, "onebit-bench: Lion: ");
}

Test(bench_rows, text_says_that_the_device_is_emulated) {
  expect_output(program(0, "onebit-bench codec -d cuda -m64K -i3 -x0"), "mean nothing");
}

/* Checks the rows that a subcommand prints for a device. In `compared` of these rows the results
 * must equal the host's. */
static void check_device(const char *subcommand, const char *ranks, size_t rows, size_t compared) {
  static const char *const fields[] = {
      "\"transport\":\"", "\"row\":\"", "\"median_us\":", "\"algbw_gbs\":", "\"right\":", NULL};
  const char *said = program(
      0, "onebit-bench %s -d cuda %s -m16K:32K -i3 -x1 -c --json 2>/dev/null", subcommand, ranks);
  cr_expect_eq(count_objects(said, fields), 2 * rows, "%s %s: %s", subcommand, ranks, said);
  size_t right = 0;
  for (const char *at = said; (at = strstr(at, "\"right\":true")); at++)
    right++;
  cr_expect_eq(right, 2 * compared, "%s %s: %s", subcommand, ranks, said);
}

Test(bench_rows, results_on_a_device_are_the_host_s) {
  check_device("allreduce", "--ranks 1", 2, 2);
  check_device("allreduce", "--ranks 3", 2, 2);
  check_device("allgather", "--ranks 2 --dtype bfloat16", 2, 2);
#ifdef ONEBIT_HAVE_NCCL
  check_device("allreduce", "--nccl-ranks 3", 4, 2);
  check_device("allgather", "--nccl-ranks 2", 4, 2);
  check_device("reduce-scatter", "--nccl-ranks 3 --no-dense", 2, 2);
#endif
}

#endif

/*
 * onebit-bench's dense baseline optimizers must give the same bits as the library's warm-up. Only
 * LAMB's norms are summed in a different order.
 */

enum { COUNT = 5003, STEPS = 3 };
struct fused_arrays {
  float parameter[COUNT], momentum[COUNT], variance[COUNT], update[COUNT];
};

static void fill_arrays(struct fused_arrays *arrays) {
  memset(arrays, 0, sizeof *arrays);
  fill_input(arrays->parameter, ONEBIT_FLOAT32, COUNT, 3, 0);
}

static const struct ob_adam_factors factors = {0.9f, 0.99f, 0.1f, 0.01f, 1.5f, 2.5f, 1e-6f};
static const struct ob_lion_factors lion = {0.9f, 0.1f, 0.98f, 0.02f};

static void run_pass(struct fused_arrays *arrays, float *gradient, enum ob_pass_kind kind) {
  struct ob_pass_run run = {.kind = kind,
                            .width = 1,
                            .count = COUNT,
                            .arrays = {[OB_MOMENTUM] = arrays->momentum,
                                       [OB_VARIANCE] = arrays->variance,
                                       [OB_SCRATCH] = gradient},
                            .parameter = arrays->parameter,
                            .factors = {.adam = factors,
                                        .lion = lion,
                                        .gradient_factor = 1,
                                        .learning_rate = 0.01f,
                                        .weight_decay = 0.1f,
                                        .bound = INFINITY}};
  ob_codec_scalar.pass(&run);
}

static void check_fused(void (*fused_step)(struct bench_fused *), enum ob_pass_kind kind) {
  static struct fused_arrays plain, wanted;
  static float gradient[COUNT], given[COUNT];
  fill_arrays(&plain);
  fill_arrays(&wanted);
  for (int step = 0; step < STEPS; step++) {
    fill_input(gradient, ONEBIT_FLOAT32, COUNT, 0, step);
    memcpy(given, gradient, sizeof given);
    struct bench_fused fused = {.factors = &factors,
                                .lion = &lion,
                                .learning_rate = 0.01f,
                                .weight_decay = 0.1f,
                                .count = COUNT,
                                .gradient = gradient,
                                .parameter = plain.parameter,
                                .momentum = plain.momentum,
                                .variance = plain.variance,
                                .update = plain.update};
    fused_step(&fused);
    run_pass(&wanted, given, kind);
  }
  CHECK_BITS("momentum", plain.momentum, wanted.momentum, COUNT, ONEBIT_FLOAT32);
  CHECK_BITS("variance", plain.variance, wanted.variance, COUNT, ONEBIT_FLOAT32);
  CHECK_BITS("parameters", plain.parameter, wanted.parameter, COUNT, ONEBIT_FLOAT32);
  if (kind == OB_PASS_LAMB) /* the library stores the update in the gradient's array */
    CHECK_BITS("update", plain.update, given, COUNT, ONEBIT_FLOAT32);
}

Test(bench_fused, plain_loops_are_the_dense_optimizers) {
  check_fused(bench_fused_adam, OB_PASS_ADAM);
  check_fused(bench_fused_momentum, OB_PASS_SGD);
  check_fused(bench_fused_lion, OB_PASS_LION);
  check_fused(bench_fused_lamb, OB_PASS_LAMB);
  float p[3] = {3, 4, 0}, u[3] = {0, 1, 0};
  struct bench_fused lamb = {.learning_rate = 0.5f,
                             .count = 3,
                             .parameter = p,
                             .update = u,
                             .norms = {25, 1}}; /* the ratio is 5 */
  bench_fused_lamb_move(&lamb);
  CHECK(p[0] == 3 && p[1] == 4 - 0.5f * 5, "moved to %g and %g", (double)p[0], (double)p[1]);
}
