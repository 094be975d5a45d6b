/* Prints the reports of train_run.h. */
#define _POSIX_C_SOURCE 200809L
#include "examples/train_run.h"

#include <inttypes.h>
#include <math.h>
#include <unistd.h>

/* Returns the name of a stage. Only trainings with a compressed optimizer have two stages. */
static const char *stage_name(const training_t *training, onebit_stage_t stage) {
  static const char *const names[][2] = {{"warm-up", "compressed"}, {"variance", "local"}};
  return training->form == COMPRESSED ? names[training->options->method == ZERO_ONE_ADAM][stage]
         : training->form == OUTER    ? "local"
                                      : "dense";
}

static double per_step(const tally_t *tally, double sum) {
  return tally->steps > 0 ? sum / (double)tally->steps : 0.0;
}

/* Prints a number, or null if it is not finite: JSON has no such number. */
static void print_json_number(FILE *file, const char *name, double number) {
  if (isfinite(number))
    fprintf(file, ",\"%s\":%.6g", name, number);
  else
    fprintf(file, ",\"%s\":null", name);
}

/* --- During a training
 * -------------------------------------------------------------------------- */

/* Continues the log of a resumed training: reads the totals up to the step of the checkpoint, and
 * removes the lines of later steps, which will be made again. */
static int continue_log(training_t *training) {
  char text[512];
  long end = 0;
  while (fgets(text, sizeof text, training->log)) {
    size_t step;
    double seconds;
    uint64_t bytes;
    if (sscanf(text, "{\"step\":%zu,\"seconds\":%lf,\"bytes\":%" SCNu64, &step, &seconds, &bytes) !=
            3 ||
        step > training->first)
      break;
    training->logged_seconds = seconds;
    training->logged_bytes = bytes;
    end = ftell(training->log);
  }
  return fseek(training->log, end, SEEK_SET) == 0 && ftruncate(fileno(training->log), end) == 0;
}

int report_open(training_t *training) {
  const char *path = training->options->log;
  if (path && training->team->rank == 0) {
    training->log = training->first > 0 ? fopen(path, "r+") : NULL;
    if (!training->log || !continue_log(training)) {
      report_close(training);
      training->log = fopen(path, "w");
    }
  }
  return agree_on_success(training->team, !path || training->team->rank != 0 || training->log,
                          "--log: the file cannot be written");
}

void report_close(training_t *training) {
  if (training->log)
    fclose(training->log);
  training->log = NULL;
}

void report_head(const training_t *training) {
  print_once(training->team,
             "\n%s, %zu parameters in %zu tensors\n"
             "  step  stage          loss  learning rate  %s/s  sent/rank/step\n",
             train_form_name(training->options->method, training->form), training->parameters,
             training->ntensors, training->task.kind->samples);
}

static void report_progress(const training_t *training, size_t step, onebit_stage_t stage,
                            const tally_t *since) {
  const train_options_t *options = training->options;
  const size_t samples = since->steps * training->team->size * options->accumulate *
                         options->batch * training->task.model->rows;
  print_once(training->team, "%6zu  %-10s  %7.4f  %13.2e  %8.0f  %14.0f\n", step,
             stage_name(training, stage), training->loss,
             (double)train_learning_rate(options, step - 1), (double)samples / since->seconds,
             per_step(since, (double)since->bytes));
}

static double sum_seconds(const training_t *training) {
  return training->tally[0].seconds + training->tally[1].seconds;
}

static uint64_t sum_bytes(const training_t *training) {
  return training->tally[0].bytes + training->tally[1].bytes;
}

static size_t report_all_steps(const training_t *training) {
  return training->tally[0].steps + training->tally[1].steps;
}

/* Returns an error if the loss is not finite, or if too many steps in a row were skipped. While the
 * loss scale is too large, every step is skipped and halves it: 30 steps from 2^30 to 1. */
static int check_progress(const training_t *training, const tally_t *since) {
  char error[TRAIN_ERROR];
  snprintf(error, sizeof error,
           "no gradient is finite any more: the latest %zu steps were skipped; a lower "
           "--learning-rate may help",
           training->skipped);
  if (agree_on_success(training->team, isfinite(since->loss),
                       "the loss is not finite any more; a lower --learning-rate may help") != 0)
    return -1;
  return agree_on_success(training->team, training->skipped <= 40, error);
}

static void log_steps(const training_t *training, size_t step, int validates) {
  fprintf(training->log, "{\"step\":%zu,\"seconds\":%.6f,\"bytes\":%" PRIu64, step,
          training->logged_seconds + sum_seconds(training),
          training->logged_bytes + sum_bytes(training));
  print_json_number(training->log, "training_loss", training->loss);
  if (validates)
    print_json_number(training->log, "loss", training->quality.loss);
  fprintf(training->log, "}\n");
  fflush(training->log);
}

/* Reports the steps since the last report. The times do not include the report's own exchanges. */
int report_steps(training_t *training, size_t step, onebit_stage_t stage, const tally_t *since) {
  const size_t every = training->options->validate_every, last = train_last_step(training->options);
  const int validates = step == last || (every > 0 && step % every == 0);
  float numbers[NUMBERS] = {(float)per_step(since, since->loss)};
  if (check_progress(training, since) != 0 ||
      average_over_ranks(training->team, numbers, "mean of the loss") != 0)
    return -1;
  training->loss = (double)numbers[0];
  report_progress(training, step, stage, since);
  if (validates && train_task_validate(&training->task, &training->quality) != 0)
    return -1;
  if (training->log)
    log_steps(training, step, validates);
  return 0;
}

/* --- After a training
 * --------------------------------------------------------------------------- */

static void print_speed(const training_t *training) {
  for (onebit_stage_t stage = ONEBIT_STAGE_WARMUP; stage <= ONEBIT_STAGE_COMPRESSED; stage++) {
    const tally_t *tally = &training->tally[stage];
    if (tally->steps > 0)
      printf("%s: %zu steps, %.3f steps/s, %.3f ms a step, %.3f of them in the optimizer\n",
             stage_name(training, stage), tally->steps, (double)tally->steps / tally->seconds,
             1e3 * per_step(tally, tally->seconds),
             1e3 * per_step(tally, tally->optimizer_seconds));
  }
}

/* True if the warm-up is compressed. Efficient-Adam always compresses its warm-up, and other
 * methods do so if --warmup-bits is given. */
static int warms_in_bits(const training_t *training) {
  const int method = training->options->method, compressed = training->form == COMPRESSED;
  return training->options->warmup_bits ||
         (compressed && (method == EFFICIENT_ADAM || method == EFFICIENT_LAMB));
}

/* Prints the bytes per step in the compressed stage and in the warm-up, and the norm of the
 * residual relative to the momentum. */
static void print_compression(const training_t *training) {
  const tally_t *first = &training->tally[ONEBIT_STAGE_WARMUP];
  const tally_t *bits = &training->tally[ONEBIT_STAGE_COMPRESSED];
  const int has_schedules = training->options->method == ZERO_ONE_ADAM;
  const double first_bytes = per_step(first, (double)first->bytes);
  const double bits_bytes = per_step(bits, (double)bits->bytes);
  printf("bytes sent per rank and step: ");
  if (first->steps > 0)
    printf("%.0f %s", first_bytes,
           has_schedules             ? "in the variance stage"
           : warms_in_bits(training) ? "in the warm-up"
                                     : "dense");
  if (bits->steps > 0)
    printf("%s%.0f %s", first->steps > 0 ? ", " : "", bits_bytes,
           has_schedules ? "in the local stage" : "compressed");
  if (first->steps > 0 && bits_bytes > 0.0)
    printf(" (1/%.2f)", first_bytes / bits_bytes);
  if (bits->steps > 0)
    printf("; residual / momentum: %.2f", training->residual_ratio);
  if (training->options->bits || training->options->max_bits)
    printf("; bits an element: %.3g, changed %llu times", training->info.bits,
           (unsigned long long)training->info.moves);
  printf("; steps skipped: %llu\n", (unsigned long long)training->info.skipped);
}

/* Returns the bytes that a rank would send if every step exchanged float32 gradients by
 * reduce-scatter and allgather. */
static double float32_bytes(const training_t *training) {
  const double ranks = (double)training->team->size;
  return 2.0 * (ranks - 1.0) / ranks * 4.0 * (double)training->parameters *
         (double)report_all_steps(training);
}

static void print_outer(const training_t *training) {
  static const char *const rules[] = {"mean", "momentum", "Nesterov"};
  const onebit_outer_info_t *outer = &training->outer;
  printf("outer step: every %zu steps; %s, rate %g, momentum %g; ", outer->local_steps,
         rules[outer->rule], outer->learning_rate, outer->momentum);
  if (outer->bits == ONEBIT_OUTER_SPARSE)
    printf("sparse");
  else
    printf("%d bits", outer->bits);
  printf("; %zu fragments, delay %zu; residual / drift: %.2f; exchanges skipped: %llu\n",
         outer->fragments, outer->delay, training->residual_ratio,
         (unsigned long long)outer->skipped);
  if (sum_bytes(training) > 0)
    printf("sent per rank: %llu bytes a round; in all 1/%.1f of float32 sums in each step\n",
           (unsigned long long)outer->exchange_bytes,
           float32_bytes(training) / (double)sum_bytes(training));
}

static void report_sum(const training_t *training) {
  const uint64_t *rounds = training->info.exchanges;
  printf("in all: %zu steps in %.2f s; sent per rank: %llu bytes, %.0f a step; steps that sent "
         "%s: %llu, one bit: %llu, nothing: %llu\n",
         report_all_steps(training), sum_seconds(training), (unsigned long long)sum_bytes(training),
         (double)sum_bytes(training) / fmax(1.0, (double)report_all_steps(training)),
         warms_in_bits(training) ? "the warm-up's bits" : "full precision",
         (unsigned long long)rounds[0], (unsigned long long)rounds[1],
         (unsigned long long)rounds[2]);
}

static void print_json(const training_t *training) {
  const train_options_t *options = training->options;
  printf("{\"training\":\"%s\",\"name\":\"%s\",\"optimizer\":\"%s\"", training->task.kind->name,
         train_form_name(options->method, training->form), train_method_name(options->method));
  printf(",\"seed\":%zu,\"ranks\":%zu,\"parameters\":%zu,\"steps\":%zu", options->seed,
         training->team->size, training->parameters, options->steps);
  print_json_number(stdout, "learning_rate", (double)options->learning_rate);
  print_json_number(stdout, "training_loss", training->loss);
  print_json_number(stdout, "loss", training->quality.loss);
  if (training->quality.accuracy >= 0.0)
    print_json_number(stdout, "accuracy", training->quality.accuracy);
  printf(",\"bytes\":%llu", (unsigned long long)sum_bytes(training));
  print_json_number(stdout, "float32_bytes", float32_bytes(training));
  print_json_number(stdout, "seconds", sum_seconds(training));
  printf(",\"checksum\":\"%016llx\"}\n", (unsigned long long)training->checksum);
}

void report_end(const training_t *training) {
  if (training->team->rank != 0)
    return;
  if (!training->options->quiet) {
    print_speed(training);
    if (training->form == OUTER)
      print_outer(training);
    else
      print_compression(training);
    if (!training->options->compare)
      report_sum(training);
  }
  if (training->options->json)
    print_json(training);
}

/* --- Comparison of two trainings
 * ---------------------------------------------------------------- */

/* Returns the totals of the steps to compare. After a warm-up, these are the steps of the
 * compressed stage. Without a warm-up, and for 0/1 Adam, these are all steps. */
static tally_t report_steady_steps(const training_t *training) {
  const tally_t *first = &training->tally[ONEBIT_STAGE_WARMUP];
  const tally_t *bits = &training->tally[ONEBIT_STAGE_COMPRESSED];
  if (training->options->method != ZERO_ONE_ADAM)
    return bits->steps > 0 ? *bits : *first;
  return (tally_t){.steps = first->steps + bits->steps,
                   .bytes = first->bytes + bits->bytes,
                   .seconds = first->seconds + bits->seconds,
                   .optimizer_seconds = first->optimizer_seconds + bits->optimizer_seconds};
}

static void report_row(const char *what, const char *format, double dense, double bits) {
  char left[32], right[32];
  snprintf(left, sizeof left, format, dense);
  snprintf(right, sizeof right, format, bits);
  printf("%-34s %14s %14s %8.4f\n", what, left, right, bits / dense);
}

void report_comparison(const training_t *dense, const training_t *bits) {
  const int method = bits->options->method;
  const tally_t a = report_steady_steps(dense), b = report_steady_steps(bits);
  printf("\n%-34s %14s %14s %8s\n", "", train_form_name(method, DENSE),
         train_form_name(method, bits->form), "ratio");
  report_row("validation loss", "%.4f", dense->quality.loss, bits->quality.loss);
  if (dense->quality.accuracy >= 0.0)
    report_row("accuracy", "%.4f", dense->quality.accuracy, bits->quality.accuracy);
  report_row("bytes sent per rank and step *", "%.0f", per_step(&a, (double)a.bytes),
             per_step(&b, (double)b.bytes));
  report_row("milliseconds per step *", "%.2f", 1e3 * per_step(&a, a.seconds),
             1e3 * per_step(&b, b.seconds));
  report_row("  of them in the optimizer *", "%.2f", 1e3 * per_step(&a, a.optimizer_seconds),
             1e3 * per_step(&b, b.optimizer_seconds));
  if (method == ZERO_ONE_ADAM || bits->form == OUTER)
    printf("* over all steps\n");
  else if (bits->tally[ONEBIT_STAGE_WARMUP].steps == 0)
    printf("* over all steps; %s is compressed from the first\n",
           train_form_name(method, COMPRESSED));
  else if (bits->tally[ONEBIT_STAGE_COMPRESSED].steps == 0)
    printf("* of %s in its warm-up, which has not ended\n", train_form_name(method, COMPRESSED));
  else
    printf("* of %s in its compressed stage, after %zu steps of warm-up\n",
           train_form_name(method, COMPRESSED), bits->tally[ONEBIT_STAGE_WARMUP].steps);
}
