/* One training of train_run.h. */
#define _POSIX_C_SOURCE 200809L
#include "examples/train_run.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples/random.h"

const char *const optimizer_names[] = {"dense Adam", "1-bit Adam", "dense Adam over MPI_Allreduce"};
static const char *const stage_names[] = {"warm-up", "compressed"};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Rises over the first tenth of the steps, then falls to a tenth of its peak, along straight lines:
 * all ranks must find the same bits, which a cosine from two C libraries might not have. */
static float learning_rate(const train_options_t *options, size_t step) {
  const size_t rise = options->steps / 10 + 1;
  if (step < rise)
    return options->learning_rate * (float)(step + 1) / (float)rise;
  return options->learning_rate *
         (1.0f - 0.9f * (float)(step - rise) / (float)(options->steps - rise));
}

static int create(training_t *training) {
  const train_options_t *options = training->options;
  const team_t *team = training->team;
  training->tokens = malloc(options->batch * (options->context + 1));
  if (agree(team, training->tokens != NULL, "out of memory for a batch") != 0 ||
      train_model_create(&training->model, training->device, team, options,
                         training->text->vocabulary) != 0)
    return -1;
  return train_optimizer_create(&training->optimizer, training->optimizer_kind, team, options,
                                &training->model);
}

static void destroy(training_t *training) {
  train_optimizer_destroy(&training->optimizer);
  train_model_destroy(&training->model);
  free(training->tokens);
  if (training->log)
    fclose(training->log);
}

/* The gradient of this rank's own sequences. */
static double compute_gradient(training_t *training, size_t step) {
  const train_options_t *options = training->options;
  uint64_t random = random_stream(options->seed, 1 + training->team->rank, step);
  text_sample(training->text, options->batch, options->context + 1, &random, training->tokens);
  return training->device->gradient(&training->model, training->tokens, options->batch);
}

/* The optimizer's time includes waiting for a slower rank. */
static int take_step(training_t *training, size_t step, tally_t *tally) {
  train_optimizer_t *optimizer = &training->optimizer;
  const float rate = learning_rate(training->options, step);
  const uint64_t sent = train_optimizer_sent(optimizer);
  const double start = now();
  onebit_status_t status = train_optimizer_begin(optimizer, rate);
  if (check(training->team, status, "optimizer") != 0)
    return -1;
  const double loss = compute_gradient(training, step), middle = now();
  status = train_optimizer_step(optimizer, rate);
  const double end = now();
  *tally = (tally_t){.steps = 1,
                     .bytes = train_optimizer_sent(optimizer) - sent,
                     .loss = loss,
                     .seconds = end - start,
                     .optimizer_seconds = end - middle};
  return status == ONEBIT_SKIPPED ? 0 : check(training->team, status, "optimizer step");
}

static void add(tally_t *sum, const tally_t *tally) {
  sum->steps += tally->steps;
  sum->bytes += tally->bytes;
  sum->loss += tally->loss;
  sum->seconds += tally->seconds;
  sum->optimizer_seconds += tally->optimizer_seconds;
}

double per_step(const tally_t *tally, double sum) {
  return tally->steps > 0 ? sum / (double)tally->steps : 0.0;
}

/* The loss on the held-out text: rank r takes every size-th window from window r on. */
static int validate(training_t *training) {
  const train_options_t *options = training->options;
  const team_t *team = training->team;
  const size_t context = options->context, windows = text_held_out(training->text, context);
  double sum = 0.0, count = 0.0;
  for (size_t window = team->rank; window < windows;) {
    size_t filled = 0;
    for (; filled < options->batch && window < windows; filled++, window += team->size)
      text_held_out_window(training->text, context, window,
                           training->tokens + filled * (context + 1));
    sum += (double)filled * training->device->loss(&training->model, training->tokens, filled);
    count += (double)filled;
  }
  float numbers[NUMBERS] = {(float)sum, (float)count};
  if (mean(team, numbers, "validation loss") != 0)
    return -1;
  training->validation_loss = (double)numbers[0] / (double)numbers[1];
  say(team, "validation loss %.4f over %zu bytes of held-out text\n", training->validation_loss,
      windows * context);
  return 0;
}

static void print_progress(const training_t *training, size_t step, onebit_stage_t stage,
                           const tally_t *since, double loss) {
  const train_options_t *options = training->options;
  const size_t tokens = since->steps * training->team->size * options->batch * options->context;
  say(training->team, "%6zu  %-10s  %7.4f  %13.2e  %8.0f  %14.0f\n", step,
      training->optimizer_kind == ONEBIT_ADAM ? stage_names[stage] : "dense", loss,
      (double)learning_rate(options, step - 1), (double)tokens / since->seconds,
      per_step(since, (double)since->bytes));
}

static double seconds(const training_t *training) {
  return training->tally[0].seconds + training->tally[1].seconds;
}

/* What is exchanged here is not timed. */
static int report(training_t *training, size_t step, onebit_stage_t stage, const tally_t *since) {
  const size_t every = training->options->validate_every, last = training->options->steps;
  const int validates = step == last || (every > 0 && step % every == 0);
  float numbers[NUMBERS] = {(float)per_step(since, since->loss)};
  if (mean(training->team, numbers, "mean of the loss") != 0)
    return -1;
  print_progress(training, step, stage, since, (double)numbers[0]);
  if (validates && validate(training) != 0)
    return -1;
  if (!training->log)
    return 0;
  fprintf(training->log, "%zu %.6f %.6f", step, seconds(training), (double)numbers[0]);
  fprintf(training->log, validates ? " %.6f\n" : "\n", training->validation_loss);
  return 0;
}

static int is_reported(const train_options_t *options, size_t step) {
  return step % options->report_every == 0 || step == options->steps ||
         (options->validate_every > 0 && step % options->validate_every == 0);
}

static int take_steps(training_t *training) {
  onebit_stage_t stage = ONEBIT_STAGE_WARMUP;
  tally_t since = {0}, one;
  say(training->team,
      "\n%s, %zu parameters in %zu tensors\n"
      "  step  stage          loss  learning rate  tokens/s  sent/rank/step\n",
      optimizer_names[training->optimizer_kind], training->model.host->parameters,
      training->model.host->ntensors);
  for (size_t step = 1; step <= training->options->steps; step++) {
    if (take_step(training, step - 1, &one) != 0)
      return -1;
    add(&training->tally[stage], &one);
    add(&since, &one);
    if (is_reported(training->options, step)) {
      if (report(training, step, stage, &since) != 0)
        return -1;
      since = (tally_t){0};
    }
    if (stage == ONEBIT_STAGE_WARMUP)
      stage = train_optimizer_info(&training->optimizer).stage;
  }
  return 0;
}

uint64_t hash(uint64_t start, const void *data, size_t size) {
  const unsigned char *bytes = data;
  uint64_t h = start ^ 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++)
    h = (h ^ bytes[i]) * 0x100000001b3u;
  return h;
}

static int check_parameters(training_t *training) {
  const transformer_t *model = training->model.host;
  uint64_t sum = 0;
  training->device->fetch(&training->model);
  for (size_t t = 0; t < model->ntensors; t++)
    sum = hash(sum, model->tensors[t].value, model->tensors[t].count * sizeof(float));
  const int equal = same(training->team, sum);
  if (equal)
    say(training->team, "parameters: the same bits on all %zu ranks, checksum %016llx\n",
        training->team->size, (unsigned long long)sum);
  else
    complain(training->team, "the ranks do not hold the same parameters");
  return equal ? 0 : -1;
}

static size_t draw_token(const float *probabilities, size_t vocabulary, uint64_t *random) {
  float left = random_uniform(random);
  size_t token = 0;
  while (token + 1 < vocabulary && left >= probabilities[token])
    left -= probabilities[token++];
  return token;
}

static void print_byte(unsigned char byte) { putchar(byte < ' ' && byte != '\n' ? '?' : byte); }

/* Goes on from the first held-out window, byte by byte. */
static void generate(training_t *training) {
  if (training->options->sample == 0)
    return;
  const text_t *text = training->text;
  const size_t context = training->options->context;
  uint64_t random = random_stream(training->options->seed, 0, 1);
  unsigned char *tokens = training->tokens;
  text_held_out_window(text, context, 0, tokens);
  printf("\nSample, going on from the held-out text\n----\n");
  for (size_t i = 0; i < context; i++)
    print_byte(text->bytes[tokens[i]]);
  printf(" >>> ");
  for (size_t i = 0; i < training->options->sample; i++) {
    training->device->predict(&training->model, tokens);
    const float *next = training->model.host->next + (context - 1) * text->vocabulary;
    const size_t token = draw_token(next, text->vocabulary, &random);
    print_byte(text->bytes[token]);
    memmove(tokens, tokens + 1, context);
    tokens[context - 1] = (unsigned char)token;
  }
  printf("\n----\n");
}

/* What the compressed stage sent against the warm-up, and how large the error is that waits to be
 * sent, next to the momentum that it belongs to. */
static void print_compression(const training_t *training) {
  const tally_t *dense = &training->tally[ONEBIT_STAGE_WARMUP];
  const tally_t *bits = &training->tally[ONEBIT_STAGE_COMPRESSED];
  const double dense_bytes = per_step(dense, (double)dense->bytes);
  const double compressed_bytes = per_step(bits, (double)bits->bytes);
  const onebit_optimizer_info_t info = train_optimizer_info(&training->optimizer);
  printf("bytes sent per rank and step: %.0f dense", dense_bytes);
  if (bits->steps > 0 && training->team->size > 1)
    printf(", %.0f compressed (1/%.2f)", compressed_bytes, dense_bytes / compressed_bytes);
  if (bits->steps > 0)
    printf("; kept error / momentum: %.2f", info.error_norm / info.momentum_norm);
  printf("; steps skipped: %llu\n", (unsigned long long)info.skipped);
}

static void print_speed(const training_t *training) {
  for (int stage = ONEBIT_STAGE_WARMUP; stage <= ONEBIT_STAGE_COMPRESSED; stage++) {
    const tally_t *tally = &training->tally[stage];
    if (tally->steps > 0)
      printf("%s: %zu steps, %.3f steps/s, %.3f ms a step, %.3f of them in the optimizer\n",
             training->optimizer_kind == ONEBIT_ADAM ? stage_names[stage] : "dense", tally->steps,
             (double)tally->steps / tally->seconds, 1e3 * per_step(tally, tally->seconds),
             1e3 * per_step(tally, tally->optimizer_seconds));
  }
}

static int open_log(training_t *training) {
  const char *path = training->options->log;
  if (path && training->team->rank == 0) {
    training->log = fopen(path, "w");
    if (training->log)
      fprintf(training->log, "# step seconds training-loss validation-loss\n");
  }
  return agree(training->team, !path || training->team->rank != 0 || training->log != NULL,
               "--log: the file cannot be written");
}

int train(training_t *training) {
  int result = create(training);
  if (result == 0)
    result = open_log(training);
  if (result == 0)
    result = take_steps(training);
  if (result == 0)
    result = check_parameters(training);
  if (result == 0 && training->team->rank == 0) {
    print_speed(training);
    print_compression(training);
    generate(training);
  }
  destroy(training);
  return result;
}
