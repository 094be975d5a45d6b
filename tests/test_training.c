/*
 * Tests the common part of the training programs in examples/, on small drawn digits and four
 * ranks. Each optimizer must learn, but not without error feedback. A training that is saved and
 * resumed must end with the same bits. Options that must not affect the result must change no bit.
 */
#include <stdarg.h>

#include "examples/images.h"
#include "examples/train_run.h"
#include "tests/support.h"
#include "tests/support_disk.h"

enum { RANKS = 4, MOST_ARGUMENTS = 40 };

struct outcome {
  train_options_t options;
  images_t images;
  training_t training; /* of rank 0 */
};

static int run_rank(team_t *team, const void *context) {
  struct outcome *outcome = (struct outcome *)(uintptr_t)context;
  const train_options_t *options = &outcome->options;
  training_t training = {.options = options, .team = team, .form = train_options_form(options)};
  team->quiet = 1;
  const int result = train(&training, &train_kind, &outcome->images);
  if (team->rank == 0)
    outcome->training = training;
  return result == 0 ? 0 : 1;
}

static void parse_options(train_options_t *options, const char *arguments) {
  char words[TRAIN_ERROR] = "", *argv[MOST_ARGUMENTS];
  const int argc = split_line(argv, "train_images %s", arguments);
  cr_assert_eq(train_options_parse(&train_kind, options, argc, argv, words), TOOL_RUN, "%s", words);
  options->checkpoint = options->checkpoint ? strdup(options->checkpoint) : NULL;
  options->log = options->log ? strdup(options->log) : NULL;
}

static void draw_digits(images_t *images) {
  char words[IMAGE_ERROR];
  cr_assert_eq(images_draw(images, 1000, 16, words), 0, "%s", words);
  images_split(images, 200);
}

/* Runs a training with these options on `ranks` ranks. */
static training_t train_on(size_t ranks, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static training_t train_on(size_t ranks, const char *format, ...) {
  struct outcome outcome = {.training = {0}};
  char arguments[PATH_ROOM + 512] = "--channels 4 --hidden 16 --quiet ";
  const size_t used = strlen(arguments);
  va_list rest;
  va_start(rest, format);
  vsnprintf(arguments + used, sizeof arguments - used, format, rest);
  va_end(rest);
  parse_options(&outcome.options, arguments);
  draw_digits(&outcome.images);
  cr_expect_eq(team_run("test", ranks, run_rank, &outcome), 0, "%s", arguments);
  images_free(&outcome.images);
  free((void *)(uintptr_t)outcome.options.checkpoint);
  free((void *)(uintptr_t)outcome.options.log);
  return outcome.training;
}

/* --- Learning ----------------------------------------------------------------------------------*/

/* Trains for 600 steps, of which none, a fifth or half are dense. Random guesses have a loss of ln
 * 10 = 2.3. Without error feedback most methods stay near that loss, or return to it. */
static void check_learns(const char *arguments) {
  const training_t fed_back = train_on(RANKS, "--batch 8 --steps 600 %s", arguments);
  const training_t control =
      train_on(RANKS, "--batch 8 --steps 600 --no-error-feedback %s", arguments);
  cr_log_info("%s: loss %.3f, control %.3f", arguments, fed_back.loss, control.loss);
  cr_expect_lt(fed_back.loss, 1.0, "%s: loss %g", arguments, fed_back.loss);
  cr_expect_gt(fed_back.quality.accuracy, 0.45, "%s: %g are right", arguments,
               fed_back.quality.accuracy);
  cr_expect_gt(control.loss, 1.3 * fed_back.loss, "%s: the control is no worse: %g", arguments,
               control.loss);
}

Test(training, efficient_adam_learns) {
  check_learns("--optimizer efficient-adam --learning-rate 0.005");
}
Test(training, adam_learns) { check_learns("--optimizer adam --learning-rate 0.005"); }
Test(training, adam_that_exchanges_steps_learns) {
  check_learns("--optimizer adam --exchange step --learning-rate 0.005");
}
Test(training, adam_in_shards_learns) {
  check_learns("--optimizer adam --shards step --learning-rate 0.005");
  check_learns("--optimizer adam --shards parameters --learning-rate 0.005");
}
Test(training, lamb_learns) { check_learns("--optimizer lamb --learning-rate 0.005"); }
Test(training, zero_one_adam_learns) {
  check_learns("--optimizer zero-one-adam --learning-rate 0.005");
}
Test(training, momentum_learns) { check_learns("--optimizer momentum --learning-rate 0.02"); }

/* Makes 60 exchanges, of all elements at once or of a part at a time, applied at once or later.
 * Random guesses have a loss of 2.3. */
Test(training, outer_steps_learn) {
  const char *const cases[] = {
      "", "--outer-fragments 3 --outer-delay 5", "--outer-rule momentum --optimizer momentum",
      "--outer-rule nesterov --outer-bits 8 --optimizer lamb", "--outer-bits sparse"};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const training_t training =
        train_on(RANKS, "--batch 8 --steps 600 --learning-rate 0.005 --outer 10 %s", cases[i]);
    cr_expect_lt(training.loss, 1.6, "%s: loss %g", cases[i], training.loss);
  }
}

/* Tests --method auto with modelled links. Without a modelled link, dense exchanges are chosen if
 * one takes less than a twentieth of a gradient's time. With 5 s per gradient this holds even on a
 * busy machine. */
Test(training, method_is_chosen) {
  static const struct {
    const char *given;
    form_t form;
  } rows[] = {{"auto --step-seconds 5", DENSE},
              {"auto --link 0.2", COMPRESSED},
              {"auto --link 0.005", COMPRESSED},
              {"auto-local-steps --link 0.005", OUTER}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const training_t training =
        train_on(RANKS, "--batch 4 --steps 1 --step-seconds 1 --method %s", rows[i].given);
    cr_expect(training.form == rows[i].form && !training.chosen.outer == (training.form != OUTER),
              "%s: form %d, %zu local steps", rows[i].given, (int)training.form,
              training.chosen.outer);
  }
}

/* Sites that are all in time must learn as single ranks do. */
Test(training, sites_learn_as_ranks_do) {
  const char run[] = "--batch 8 --steps 45 --outer 10 --outer-bits 32";
  const training_t ranks = train_on(RANKS, "%s", run);
  const training_t sites = train_on(RANKS, "%s --outer-patience 1000", run);
  cr_expect_float_eq(ranks.quality.loss, sites.quality.loss, 1e-4, "%.9g and %.9g",
                     ranks.quality.loss, sites.quality.loss);
}

Test(training, dense_outer_steps_of_one_step_are_data_parallel) {
  const char *run = "--optimizer momentum --batch 4 --steps 20";
  const training_t dense = train_on(RANKS, "%s --dense", run);
  const training_t outer = train_on(RANKS, "%s --outer 1 --outer-bits 32", run);
  const training_t alone = train_on(RANKS, "%s --outer 20 --outer-bits 32", run);
  cr_expect_float_eq(outer.quality.loss, dense.quality.loss, 1e-4, "%.9g and %.9g",
                     outer.quality.loss, dense.quality.loss);
  cr_expect_gt(fabs(alone.quality.loss - dense.quality.loss), 1e-3, "local steps have no effect");
}

/* Training in 16-bit numbers must succeed as in float32. float16 needs a loss scale for small
 * gradients. */
static void check_learns_in_sixteen_bits(const char *method) {
  const char *const cases[] = {
      "--parameters bfloat16 --gradients bfloat16",
      "--parameters float16 --gradients float16 --loss-scale 65536 --loss-scale-interval 50",
      "--parameters bfloat16 --dense",
      "--gradients float16 --clip-norm 100 --accumulate 2",
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const training_t training =
        train_on(RANKS, "--batch 8 --steps 600 --learning-rate 0.005 %s %s", method, cases[i]);
    cr_expect_lt(training.loss, 1.0, "%s %s: loss %g", method, cases[i], training.loss);
    cr_expect_lt(training.info.skipped, 30, "%s %s: %d skipped", method, cases[i],
                 (int)training.info.skipped);
  }
}

Test(training, adam_learns_in_sixteen_bits) { check_learns_in_sixteen_bits("--optimizer adam"); }
Test(training, efficient_adam_learns_in_sixteen_bits) {
  check_learns_in_sixteen_bits("--optimizer efficient-adam");
}

/* --- Trainings that must end with the same bits
 * -------------------------------------------------- */

static void expect_same_end(const training_t *a, const training_t *b, const char *what) {
  cr_expect_eq(a->checksum, b->checksum, "%s: other parameters", what);
  cr_expect_eq(memcmp(&a->quality, &b->quality, sizeof a->quality), 0,
               "%s: losses %.9g and %.9g of the held-out images", what, a->quality.loss,
               b->quality.loss);
  cr_expect_eq(a->info.steps, b->info.steps, "%s: %d steps and %d", what, (int)a->info.steps,
               (int)b->info.steps);
}

static void expect_different_end(const training_t *a, const training_t *b, const char *what) {
  cr_expect_neq(a->checksum, b->checksum, "%s: the same parameters", what);
}

/* Makes 30 steps. The first stage has 10 dense steps, or, with 0/1 Adam, the 15 steps before the
 * variance is frozen. Efficient-Adam has no dense step. The training is saved in the first stage,
 * at the end of this stage, and in the second stage, with 0/1 Adam also between two synchronisation
 * steps. */
static void check_resumes(const char *arguments) {
  char directory[PATH_ROOM];
  const char *run = "--batch 4 --steps 30 --freeze-step 10 --learning-rate 0.005";
  const training_t whole = train_on(RANKS, "%s %s", run, arguments);
  const size_t stops[] = {7, 10, 15, 20, 29};
  scratch_create(directory);
  for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
    train_on(RANKS, "%s %s --checkpoint %s --stop-at %zu", run, arguments, directory, stops[i]);
    const training_t rest =
        train_on(RANKS, "%s %s --checkpoint %s --resume", run, arguments, directory);
    cr_expect_eq(rest.first, stops[i], "%s: resumed after step %zu", arguments, rest.first);
    expect_same_end(&whole, &rest, arguments);
  }
  scratch_remove(directory);
}

/* test_checkpoint.c tests that every optimizer's checkpoint is complete. The cases in this test
 * have stages, shards, steps without an exchange, and a loss scale. */
Test(training, goes_on_as_it_would_have) {
  check_resumes("--optimizer efficient-adam");
  check_resumes("--optimizer adam --shards parameters --parameters bfloat16");
  check_resumes("--optimizer zero-one-adam --local-step-scaler 3");
  check_resumes("--optimizer adam --parameters float16 --gradients bfloat16 --loss-scale 1e6 "
                "--loss-scale-interval 6");
  check_resumes("--dense --clip-norm 1");
}

/* The last of several checkpoints is resumed. A training that is complete is not resumed. */
Test(training, the_latest_checkpoint_counts) {
  char directory[PATH_ROOM], arguments[PATH_ROOM + 100];
  struct outcome outcome = {.training = {0}};
  scratch_create(directory);
  train_on(2, "--batch 4 --steps 30 --checkpoint %s --save-every 4 --stop-at 22", directory);
  const training_t rest = train_on(2, "--batch 4 --steps 30 --checkpoint %s --resume", directory);
  cr_expect_eq(rest.first, 22);
  snprintf(arguments, sizeof arguments,
           "--channels 4 --hidden 16 --batch 4 --steps 30 --checkpoint %s --resume", directory);
  parse_options(&outcome.options, arguments);
  draw_digits(&outcome.images);
  cr_expect_eq(team_run("test", 2, run_rank, &outcome), 1);
  images_free(&outcome.images);
  free((void *)(uintptr_t)outcome.options.checkpoint);
  scratch_remove(directory);
}

/* Returns the bytes after `step` steps, from the log's last line. Sets *lines to the number of
 * lines. */
static uint64_t logged_bytes(const char *path, size_t step, size_t *lines) {
  char line[300], last[300] = "";
  unsigned long long bytes = 0;
  size_t found = 0;
  FILE *file = fopen(path, "r");
  cr_assert_not_null(file, "%s", path);
  for (*lines = 0; fgets(line, sizeof line, file); ++*lines)
    memcpy(last, line, sizeof last);
  fclose(file);
  cr_expect_eq(sscanf(last, "{\"step\":%zu,\"seconds\":%*f,\"bytes\":%llu,\"training_loss\":",
                      &found, &bytes),
               2, "%s", last);
  cr_expect(strstr(last, ",\"loss\":"), "no loss of the held-out data: %s", last);
  cr_expect_eq(found, step, "step %zu, not %zu", found, step);
  return bytes;
}

/* A resumed training appends to its log. It replaces lines of steps after the checkpoint, and an
 * incomplete last line. */
Test(training, the_log_goes_on_as_it_would_have) {
  const char *run = "--optimizer adam --batch 4 --steps 30 --freeze-step 10 --report-every 5 "
                    "--save-every 8";
  char directory[PATH_ROOM], whole[PATH_ROOM + 20], parts[PATH_ROOM + 20];
  size_t lines[2];
  scratch_create(directory);
  snprintf(whole, sizeof whole, "%s/whole.log", directory);
  snprintf(parts, sizeof parts, "%s/parts.log", directory);
  train_on(2, "%s --checkpoint %s/whole --log %s", run, directory, whole);
  train_on(2, "%s --checkpoint %s/parts --log %s --stop-at 16", run, directory, parts);
  FILE *file = fopen(parts, "a");
  fprintf(file,
          "{\"step\":20,\"seconds\":9.0,\"bytes\":9,\"training_loss\":9}\n{\"step\":25,\"sec");
  fclose(file);
  train_on(2, "%s --checkpoint %s/parts --log %s --resume", run, directory, parts);
  const uint64_t bytes = logged_bytes(whole, 30, &lines[0]);
  cr_expect_eq(logged_bytes(parts, 30, &lines[1]), bytes);
  cr_expect_eq(lines[0], 9, "%zu lines", lines[0]);
  cr_expect_eq(lines[1], lines[0], "%zu lines, not %zu", lines[1], lines[0]);
  scratch_remove(directory);
}

/* Changes options that must not change a bit: how gradients are passed, a loss scale that is a
 * power of two, and reports. Afterwards changes options that must change bits: the seed and the
 * method. */
static void check_which_options_matter(const char *method) {
  char run[100];
  snprintf(run, sizeof run, "--optimizer %s --batch 4 --steps 30", method);
  const training_t plain = train_on(RANKS, "%s", run);
  const char *const alike[] = {"--bucket-size 300", "--loss-scale 4096 --loss-scale-interval 5",
                               "--validate-every 7 --report-every 3"};
  const char *const unlike[] = {"--seed 2",        "--no-error-feedback", "--weight-decay 0",
                                "--clip-norm 0.5", "--dense-below 100",   "--rise 20",
                                "--epsilon 1e-8"};
  for (size_t i = 0; i < sizeof alike / sizeof *alike; i++) {
    const training_t other = train_on(RANKS, "%s %s", run, alike[i]);
    expect_same_end(&plain, &other, alike[i]);
  }
  for (size_t i = 0; i < sizeof unlike / sizeof *unlike; i++) {
    const training_t other = train_on(RANKS, "%s %s", run, unlike[i]);
    expect_different_end(&plain, &other, unlike[i]);
  }
}

Test(training, what_must_not_matter_does_not) {
  const char *run = "--batch 4 --steps 30";
  check_which_options_matter("adam");
  check_which_options_matter("efficient-adam");
  const training_t plain = train_on(RANKS, "%s", run);
  const training_t named = train_on(RANKS, "%s --optimizer efficient-adam", run);
  expect_same_end(&plain, &named, "Efficient-Adam is the default");
  const training_t momenta = train_on(RANKS, "%s --optimizer adam", run);
  const training_t steps = train_on(RANKS, "%s --optimizer adam --exchange step", run);
  expect_different_end(&momenta, &steps, "--exchange step");
  const training_t adam = train_on(RANKS, "%s --dense --optimizer adam", run);
  const char *const others[] = {"efficient-adam", "zero-one-adam"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    const training_t other = train_on(RANKS, "%s --dense --optimizer %s", run, others[i]);
    expect_same_end(&adam, &other, others[i]); /* the dense form of these methods is Adam */
  }
}

/* Two micro-batches of 4 images have the same sums as one of 8, except for the order of additions.
 * Gradients that are passed in parts or after the backward pass give the same bits. */
Test(training, micro_batches_add_up) {
  const char *run = "--optimizer momentum --dense --steps 10";
  const training_t one = train_on(1, "%s --batch 8", run);
  const training_t two = train_on(1, "%s --batch 4 --accumulate 2", run);
  const training_t parts = train_on(1, "%s --batch 4 --accumulate 2 --bucket-size 100", run);
  cr_expect_float_eq(one.quality.loss, two.quality.loss, 1e-5, "%.9g and %.9g", one.quality.loss,
                     two.quality.loss);
  expect_same_end(&two, &parts, "in parts");
  const training_t half = train_on(1, "%s --batch 4", run);
  cr_expect_gt(fabs(half.quality.loss - one.quality.loss), 1e-4, "the second has no effect");
}

/* Tests that --hard same gives all ranks rank 0's samples, and that --zero-steps and --hard idle
 * leave parameters unchanged if no rank has a gradient. */
Test(training, hard_cases_are_what_they_say) {
  const char *run = "--dense --batch 4 --weight-decay 0";
  const training_t one = train_on(1, "%s --steps 1", run);
  const training_t same = train_on(2, "%s --steps 1 --hard same", run);
  cr_expect_eq(one.checksum, same.checksum, "--hard same: other samples than rank 0's");
  const training_t unmoved = train_on(2, "%s --steps 10 --learning-rate 0", run);
  const training_t zero = train_on(2, "%s --steps 10 --zero-steps 10 --bucket-size 100", run);
  const training_t idle = train_on(1, "%s --steps 10 --hard idle", run);
  cr_expect_eq(zero.checksum, unmoved.checksum, "--zero-steps: parameters move");
  cr_expect_eq(idle.checksum, unmoved.checksum, "--hard idle: rank 0 moves parameters");
  const training_t later = train_on(2, "%s --steps 10 --zero-steps 9", run);
  const training_t other = train_on(2, "%s --steps 10 --hard idle", run);
  expect_different_end(&later, &unmoved, "--zero-steps 9 of 10");
  expect_different_end(&other, &unmoved, "--hard idle on two ranks");
}
