/*
 * onebit-bench optimizers: times a step of each optimizer as a program calls it, on one rank and in
 * the compressed stage. For comparison it also times the dense step of the same optimizer. On the
 * host this is a fused loop with the widest vectors of this processor, and on a device it is the
 * library's kernel.
 *
 * The single rank exchanges with itself: it compresses, reduces and applies all elements. With P
 * ranks, each rank would reduce only a P-th of the elements.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench/bench_passes.h"
#include "optimizers/optimizer.h"

/* A row. `options` are the names of options that are set to 1, so that the warm-up ends after the
 * first step. `fused` has the loops of the dense step on the host. */
struct step {
  const char *name;
  const struct ob_method *method;
  const char *options[2];
  void (*fused[2])(struct bench_fused *fused);
  enum ob_pass_kind kinds[2]; /* the dense step on a device */
};

#define DENSE_ADAM .fused = {bench_fused_adam}, .kinds = {OB_PASS_ADAM}
#define DENSE_LAMB                                                                                 \
  .fused = {bench_fused_lamb, bench_fused_lamb_move}, .kinds = {OB_PASS_LAMB, OB_PASS_LAMB_MOVE}

/* The rows. 0/1 Adam has three kinds of steps in its compressed stage. In each of its rows nearly
 * all steps are of the kind that the row names. */
static const struct step steps[] = {
    {"Efficient-Adam", &ob_method_efficient_adam, {"warmup_steps"}, DENSE_ADAM},
    {"1-bit Adam", &ob_method_adam, {"freeze_step"}, DENSE_ADAM},
    {"1-bit LAMB", &ob_method_lamb, {"freeze_step"}, DENSE_LAMB},
    {"0/1 Adam, bits", &ob_method_zero_one_adam, {"variance_update_scaler"}, DENSE_ADAM},
    {"0/1 Adam, synchronisation", &ob_method_zero_one_adam, {"variance_freeze_step"}, DENSE_ADAM},
    {"0/1 Adam, local step",
     &ob_method_zero_one_adam,
     {"variance_freeze_step", "local_step_scaler"},
     DENSE_ADAM},
    {"1-bit momentum SGD",
     &ob_method_momentum,
     {"warmup_steps"},
     .fused = {bench_fused_momentum},
     .kinds = {OB_PASS_SGD}},
    {"Lion", &ob_method_lion, .fused = {bench_fused_lion}, .kinds = {OB_PASS_LION}},
};

/* --- The timed steps */

struct run {
  const struct step *step;
  struct bench_passes *passes;
  onebit_optimizer_t optimizer;
};

static int run_dense(const struct bench_entry *entry) {
  const struct run *run = entry->context;
  struct bench_passes *passes = run->passes;
  struct bench_fused fused = {.factors = &bench_factors,
                              .lion = &bench_lion_factors,
                              .learning_rate = passes->learning_rate,
                              .weight_decay = passes->weight_decay,
                              .count = passes->count,
                              .gradient = passes->arrays[BENCH_GRADIENT],
                              .parameter = passes->arrays[BENCH_PARAMETERS],
                              .momentum = passes->arrays[BENCH_MOMENTUM],
                              .variance = passes->arrays[BENCH_VARIANCE],
                              .update = passes->arrays[BENCH_OUTPUT]};
  if (BENCH_HAS_DEVICE(passes->job))
    return bench_kernels_dense_step(passes, run->step->kinds);
  for (int k = 0; k < 2 && run->step->fused[k]; k++)
    run->step->fused[k](&fused);
  return BENCH_OK;
}

static int run_step(const struct bench_entry *entry) {
  const struct run *run = entry->context;
  if (BENCH_HAS_DEVICE(run->passes->job))
    return bench_kernels_step(run->passes, run->optimizer);
  return bench_check_status(onebit_optimizer_step(run->optimizer, run->passes->learning_rate),
                            run->step->name);
}

/* --- The optimizer of a row */

/* Sets the method's option of this name to a count. */
static void set_count(const struct ob_method *method, const char *name, size_t count,
                      unsigned char *options) {
  for (size_t k = 0; name && k < method->option_count; k++)
    if (strcmp(method->options[k].name, name) == 0)
      memcpy(options + method->options[k].from, &count, sizeof count);
}

static void fill_options(const struct step *step, const struct bench_options *given,
                         unsigned char *options) {
  const struct ob_method *method = step->method;
  const onebit_optimizer_options_t common = {.device = given->device,
                                             .scale = given->scale,
                                             .block_size = given->block_size,
                                             .chunk_size = given->chunk_size,
                                             .threads = given->threads,
                                             .bits = given->bits,
                                             .residual_copies = given->residual_copies};
  memcpy(options, &method->options_size, sizeof method->options_size);
  memcpy(options + method->common_at, &common, sizeof common);
  for (int k = 0; k < 2; k++)
    set_count(method, step->options[k], 1, options);
}

/* Creates the optimizer and takes its first step, which ends the warm-up if there is one. */
static onebit_status_t create_optimizer(struct run *run) {
  const struct bench_passes *passes = run->passes;
  const onebit_tensor_t tensor = {.parameter = passes->arrays[BENCH_PARAMETERS],
                                  .gradient = passes->arrays[BENCH_GRADIENT],
                                  .count = passes->count};
  _Alignas(double) unsigned char options[512] = {0};
  fill_options(run->step, passes->job->options, options);
  onebit_status_t status =
      ob_optimizer_create(passes->comm, run->step->method, options, &tensor, 1, &run->optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(run->optimizer, passes->learning_rate);
  if (BENCH_HAS_DEVICE(passes->job) && status == ONEBIT_OK)
    status = bench_kernels_synchronize(run->optimizer);
  return status;
}

/* --- Rows */

enum { STEP, DENSE };

struct row {
  const struct run *run;
  const struct bench_rounds *rounds;
};

/* Puts the ratio of the step's time to the time of the dense step in the same round. There are no
 * times while heads are printed. */
static void put_of_dense(struct bench_table *table, const struct bench_rounds *rounds) {
  const struct bench_entry *entries = rounds->entries;
  struct bench_statistics ratio = {.median = NAN, .minimum = NAN, .maximum = NAN};
  if (entries[STEP].times)
    ratio = bench_ratio(entries[STEP].times, entries[DENSE].times, rounds->rounds, rounds->scratch);
  bench_put_number(table, "of_dense", "of dense", 11, 3, ratio.median);
  bench_put_number(table, "of_dense_minimum", "Min", 9, 3, ratio.minimum);
  bench_put_number(table, "of_dense_maximum", "Max", 9, 3, ratio.maximum);
}

static void steps_fields(struct bench_table *table, const void *context) {
  const struct row *row = context;
  const struct bench_passes *passes = row->run->passes;
  const struct bench_statistics *step = &row->rounds->entries[STEP].time;
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_get_info(row->run->optimizer, &info);
  if (!passes->job->device)
    bench_put_text(table, "codec", NULL, 0, passes->work.codec->name);
  bench_put_number(table, "bytes", NULL, 0, 0, (double)passes->count * sizeof(float));
  bench_put_text(table, "optimizer", "Optimizer", -30, row->run->step->name);
  bench_put_number(table, "rounds", NULL, 0, 0, (double)row->rounds->rounds);
  bench_put_number(table, "launches", NULL, 0, 0, (double)row->rounds->repeats);
  bench_put_time(table, "median_us", "Median(ms)", 12, 4, step->median);
  bench_put_time(table, "minimum_us", "Min(ms)", 12, 4, step->minimum);
  bench_put_time(table, "maximum_us", "Max(ms)", 12, 4, step->maximum);
  bench_put_time(table, "dense_median_us", "Dense(ms)", 12, 4,
                 row->rounds->entries[DENSE].time.median);
  put_of_dense(table, row->rounds);
  bench_put_number(table, "memory_bytes_per_parameter", "B/param.", 11, 2,
                   (double)info.memory_bytes / (double)passes->count);
}

/* --- Measuring */

/* Times an optimizer's step and its dense step by turns, and prints the row. */
static int measure_step(struct bench_job *job, struct run *run, bool first) {
  struct bench_rounds rounds = {0};
  const struct row row = {run, &rounds};
  snprintf(job->progress.what, sizeof job->progress.what, "%s of %zu bytes", run->step->name,
           run->passes->count * sizeof(float));
  bench_rounds_add_entry(&rounds, "step", run_step, run);
  bench_rounds_add_entry(&rounds, "dense step", run_dense, run);
  bench_rounds_prepare(&rounds, run->passes);
  if (first)
    bench_passes_print_notes(
        run->passes, &rounds, "no network; dense loops use",
        "of dense: time against the dense step of the same round, median. B/param.: "
        "the optimizer's memory");
  bench_print_heads(job->table, steps_fields, &row);
  int status = bench_rounds_measure(&rounds);
  if (status == BENCH_OK)
    bench_print_row(job->table, steps_fields, &row);
  bench_rounds_destroy(&rounds);
  return status;
}

/* Measures the optimizers, except those that the library cannot create with these options. */
static int measure_steps(struct bench_job *job, struct bench_passes *passes) {
  const int count = sizeof steps / sizeof steps[0];
  int status = BENCH_OK, refused = 0;
  for (int k = 0; k < count && status == BENCH_OK; k++) {
    struct run run = {.step = &steps[k], .passes = passes};
    onebit_status_t created = create_optimizer(&run);
    if (created == ONEBIT_OK)
      status = measure_step(job, &run, k == refused);
    else if (created == ONEBIT_ERROR_ARGUMENT || created == ONEBIT_ERROR_UNSUPPORTED)
      bench_print_error("%s: %s", run.step->name, onebit_last_error()), refused++;
    else
      status = bench_check_status(created, run.step->name);
    onebit_optimizer_destroy(run.optimizer);
  }
  return refused == count ? BENCH_USAGE : status;
}

int bench_run_optimizers(struct bench_job *job) {
  return bench_measure_on_one_core(job, measure_steps);
}
