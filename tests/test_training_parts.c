/*
 * The parts of the trainings of examples/: numbers of 16 bits, schedules of learning rates, and
 * command lines, in words and as programs.
 */
#include "compression/numerics.h"
#include "examples/numbers.h"
#include "examples/train_task.h"
#include "tests/support.h"
#include "tests/support_program.h"

/* --- Numbers of 16 bits ------------------------------------------------------------------------*/

/* Each of them, and float32 in the middle between two and beside it. */
Test(training_parts, sixteen_bits_are_those_of_the_library) {
  for (uint32_t bits = 0; bits < 1u << 16; bits++) {
    const uint16_t half = (uint16_t)bits;
    const float b = from_bfloat16(half), f = from_float16(half);
    const float library_b = ob_from_bfloat16(half), library_f = ob_from_float16(half);
    cr_assert(memcmp(&b, &library_b, 4) == 0 || (isnan(b) && isnan(library_b)), "%04x", bits);
    cr_assert(memcmp(&f, &library_f, 4) == 0 || (isnan(f) && isnan(library_f)), "%04x: %g and %g",
              bits, (double)f, (double)library_f);
    for (uint32_t low = 0; low < 4; low++) {
      static const uint32_t lower[] = {0, 0x7fff, 0x8000, 0x8001}, finer[] = {0, 0xfff, 0x1000, 1};
      const float x = float_of(bits << 16 | lower[low]);
      const float y = float_of(bits_of(f) + finer[low]);
      cr_assert_eq(to_bfloat16(x), ob_to_bfloat16(x), "%g", (double)x);
      cr_assert(to_float16(x) == ob_to_float16(x) || isnan(x), "%g", (double)x);
      cr_assert(to_float16(y) == ob_to_float16(y) || isnan(y), "%g", (double)y);
    }
  }
}

/* --- Schedules ---------------------------------------------------------------------------------*/

static float rate(size_t step) {
  const train_options_t options = {.steps = 100, .learning_rate = 2.0f, .rise = 20};
  return train_learning_rate(&options, step);
}

Test(training_parts, learning_rates_rise_and_fall) {
  cr_expect_float_eq(rate(0), 0.1f, 1e-6);
  cr_expect_float_eq(rate(19), 2.0f, 1e-6);
  cr_expect_float_eq(rate(20), 2.0f, 1e-6);
  cr_expect_float_eq(rate(60), 1.1f, 1e-6);
  cr_expect_float_eq(rate(99), 0.2f + 1.8f / 80.0f, 1e-6);
}

/* --- Command lines -----------------------------------------------------------------------------*/

enum { MOST_WORDS = 16 };

/* The words of a line, after the program's name. Returns how many there are. */
static int split(const char *line, char *argv[MOST_WORDS]) {
  static char copy[512];
  int argc = 1;
  argv[0] = "train";
  snprintf(copy, sizeof copy, "%s", line);
  for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
    argv[argc++] = word;
  return argc;
}

static enum tool_asked parse(const char *line, train_options_t *options, char words[TRAIN_WORDS]) {
  char *argv[MOST_WORDS];
  const int argc = split(line, argv);
  words[0] = '\0';
  return train_options_parse(&train_kind, options, argc, argv, words);
}

Test(training_parts, options_that_are_wrong_are_named) {
  static const char *const lines[][2] = {
      {"--optimizer sgd", "--optimizer=sgd: expected efficient-adam, adam, efficient-lamb, lamb, "
                          "zero-one-adam, momentum or lion"},
      {"--steps 0", "--steps=0: expected an integer from 1 to 1000000000"},
      {"--steps -3", "--steps=-3: expected an integer"},
      {"--steps", "--steps: needs a value"},
      {"--freeze-step soon",
       "--freeze-step=soon: expected an integer from 0 to 1000000000, or auto"},
      {"--learning-rate nan",
       "--learning-rate=nan: expected a number such as 0.5 or 1e-4 from 0 to 10"},
      {"--dense=1", "--dense=1: takes no value"},
      {"--quick", "--quick: unknown option"},
      {"steps", "steps: unexpected argument"},
      {"--compare --dense", "--compare: makes both trainings; not with --dense"},
      {"--optimizer lamb --exchange step", "--exchange: is for --optimizer adam only"},
      {"--optimizer momentum --shards step", "--shards: is for --optimizer adam only"},
      {"--exchange step", "--exchange: is for --optimizer adam only"},
      {"--optimizer adam --exchange step --shards step", "--exchange step: not with --shards"},
      {"--block-size 33", "--block-size 33: not a multiple of 32"},
      {"--compare --log x", "--log x: is for one training"},
      {"--compare --checkpoint x", "--checkpoint x: is for one training"},
      {"--resume", "--resume: needs --checkpoint"},
      {"--save-every 3", "--save-every: needs --checkpoint"},
      {"--optimizer lamb --freeze-step 0", "--freeze-step 0: at least one dense step"},
      {"--optimizer momentum --freeze-step auto", "--freeze-step auto: is for adam and lamb only"},
      {"--step-seconds x",
       "--step-seconds=x: expected a number such as 0.5 or 1e-4 from 0 to 1000"},
      {"--outer-bits 1", "--outer: missing"},
      {"--outer-patience 3", "--outer: missing"},
      {"--outer 3 --outer-bits 3", "--outer-bits=3: expected auto, 1, 2, 4, 8, 32 or sparse"},
      {"--outer 3 --dense", "--outer: not with dense"},
      {"--images x", "--labels: missing"},
      {"--labels x", "--images: missing"},
      {"--side 9", "--side=9: expected an integer from 10 to 256"},
  };
  train_options_t options;
  char words[TRAIN_WORDS];
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    cr_expect_eq(parse(lines[i][0], &options, words), TOOL_WRONG, "%s: accepted", lines[i][0]);
    cr_expect(strstr(words, lines[i][1]), "%s: \"%s\" does not say \"%s\"", lines[i][0], words,
              lines[i][1]);
  }
}

Test(training_parts, defaults_follow_other_options) {
  train_options_t options;
  char words[TRAIN_WORDS];
  cr_expect_eq(parse("--steps 1000", &options, words), TOOL_RUN);
  cr_expect(options.freeze == 200 && options.rise == 101);
  cr_expect_eq(options.method, EFFICIENT_ADAM);
  cr_expect_float_eq(options.learning_rate, 8e-3f, 1e-9);
  cr_expect_eq(parse("--optimizer adam", &options, words), TOOL_RUN);
  cr_expect_float_eq(options.learning_rate, 8e-3f, 1e-9, "not the rate of the default");
  cr_expect_eq(parse("--optimizer momentum", &options, words), TOOL_RUN);
  cr_expect_eq(options.freeze, 0);
  cr_expect_gt(options.learning_rate, 1e-2f);
  cr_expect_eq(parse("--freeze-step auto --steps=7", &options, words), TOOL_RUN);
  cr_expect(options.freeze == FREEZE_AUTOMATIC && options.steps == 7);
}

/* --- Programs ----------------------------------------------------------------------------------*/

Test(training_parts, programs_say_what_came_of_it) {
  const char *small = "--ranks 2 --steps 6 --freeze-step 3 --batch 2";
  const char *said = program(0, "examples/train_images --drawn 60 --side 12 --json %s", small);
  expect_said(said, "2 ranks; 60 drawn digits of 12 x 12 pixels, 12 of them held out, 10 classes");
  expect_said(said, "Efficient-Adam, ");
  expect_said(said, "of 12 held-out images");
  expect_said(said, "parameters: the same bits on all 2 ranks, checksum ");
  expect_said(said, "in all: 6 steps in ");
  expect_said(said, "the warm-up's bits: 6, one bit: 0, nothing: 0");
  expect_said(said, "\n{\"training\":\"images\",\"name\":\"Efficient-Adam\","
                    "\"optimizer\":\"efficient-adam\",");
  said = program(0, "examples/train_images --drawn 60 --side 12 --optimizer adam --json %s", small);
  expect_said(said, "1-bit Adam, ");
  expect_said(said, "full precision: 3, one bit: 3, nothing: 0");
  expect_said(said, "\n{\"training\":\"images\",\"name\":\"1-bit Adam\",\"optimizer\":\"adam\",");
  said = program(0, "examples/train_images --drawn 60 --side 12 --compare %s", small);
  expect_said(said, "* of Efficient-Adam in its warm-up, which has not ended");
  said = program(0, "examples/train_images --drawn 60 --side 12 --compare --outer 2 %s", small);
  expect_said(said, "local Adam, ");
  expect_said(said, "outer step: every 2 steps; mean, rate 1, momentum 0; 1 bits; 1 fragments");
  expect_said(said, " of float32 in every step");
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--optimizer momentum --compare %s",
                 small);
  expect_said(said, "dense SGD, ");
  expect_said(said, "validation loss   ");
  expect_said(said, "* of 1-bit SGD in its compressed stage, after 3 steps of warm-up");
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--optimizer lion --quiet --json %s",
                 small);
  cr_expect_eq(strncmp(said, "{\"training\":\"text\"", 18), 0, "%s", said);
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--held-out 50 %s",
                 small);
  expect_said(said, " over 56 bytes of held-out text");
  said = program(0, "examples/train_words --data README.md --width 8 --vocabulary 100 --json %s",
                 small);
  expect_said(said, " words, of 100 kinds");
  expect_said(said, "Efficient-Adam, 1956 parameters in 4 tensors");
  expect_said(said, " held-out words");
  expect_said(said, "\n{\"training\":\"words\",\"name\":\"Efficient-Adam\",");
}
