/* onebit-info: says what is there and what is chosen, and refuses what the library refuses. */
#include "base/knobs.h"
#include "compression/codec.h"
#include "tests/support.h"
#include "tests/support_program.h"

static void begin(void) {
  unsetenv("ONEBIT_CODEC");
  unsetenv("ONEBIT_THREADS");
}
TestSuite(info, .init = begin, .timeout = 60);

Test(info, says_what_is_there) {
  const char *said = program(0, "onebit-info");
  expect_said(said, onebit_version());
  for (size_t i = 0; ob_codec_row(i); i++)
    expect_said(said, ob_codec_row(i)->name);
  for (size_t k = 0; k < OB_KNOB_COUNT; k++) {
    expect_said(said, ob_knobs[k].name);
    expect_said(said, ob_knobs[k].meaning);
    expect_said(said, ob_knobs[k].fallback);
  }
  expect_said(said, "usable, chosen\n");
  cr_expect(!strstr(said, "environment"), "%s", said);
}

/* A build with CUDA may run where there is no GPU: it says so, and that is no failure. */
Test(info, says_whether_there_is_a_device) {
  const char *said = program(0, "onebit-info");
#ifndef ONEBIT_HAVE_CUDA
  expect_said(said, "CUDA              built without CUDA\n");
#else
  expect_said(said, "CUDA              runtime ");
  cr_expect(strstr(said, "; no device: ") || strstr(said, "  device 0"), "%s", said);
#ifdef ONEBIT_HAVE_NCCL
  expect_said(said, "NCCL              2.");
#else
  expect_said(said, "NCCL              built without NCCL\n");
#endif
#endif
}

Test(info, says_where_a_value_comes_from) {
  setenv("ONEBIT_CODEC", "scalar", 1);
  const char *said = program(0, "onebit-info");
  expect_said(said, "scalar          usable, chosen\n");
  expect_said(said, "ONEBIT_CODEC    scalar   environment");
  expect_said(said, "ONEBIT_THREADS  1        default");
  setenv("ONEBIT_THREADS", "3", 1);
  expect_said(program(0, "onebit-info"), "ONEBIT_THREADS  3        environment");
}

Test(info, refuses_a_wrong_value_in_place) {
  setenv("ONEBIT_CODEC", "abacus", 1);
  const char *said = program(1, "onebit-info");
  expect_said(said, "ONEBIT_CODEC    abacus   environment");
  expect_said(said, "wrong: ONEBIT_CODEC=abacus: codec abacus: unknown");
  expect_said(said, "ONEBIT_THREADS  1        default");
  cr_expect(!strstr(said, "chosen\n"), "%s", said);
  unsetenv("ONEBIT_CODEC");
  setenv("ONEBIT_THREADS", "many", 1);
  said = program(1, "onebit-info");
  expect_said(said, "usable, chosen\n");
  expect_said(said, "wrong: ONEBIT_THREADS=many: not a whole number");
}

Test(info, takes_no_arguments) {
  expect_said(program(0, "onebit-info --help"), "usage: onebit-info");
  expect_said(program(2, "onebit-info --all"), "--all");
}
