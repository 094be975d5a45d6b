/*
 * train_text: data-parallel training of a character-level transformer with dense or 1-bit Adam.
 *
 *   mpirun -n 4 train_text --data /usr/share/common-licenses --compare
 *
 * Each rank draws its own sequences and computes its own gradients; onebit_optimizer_step exchanges
 * them and updates the parameters, which stay equal on all ranks to the last bit. Dense Adam is the
 * same optimizer, never frozen. The same seed gives the same run.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples/random.h"
#include "examples/text.h"
#include "examples/train_options.h"
#include "examples/train_team.h"
#include "examples/transformer.h"
#include "onebit/onebit.h"

enum { DONE = 0, FAILED = 1, WRONG_USE = 2 }; /* exit statuses */

/* Sums over some steps. */
typedef struct tally {
  size_t steps;
  uint64_t bytes; /* that this rank's optimizer handed to the transport */
  double loss;    /* the mean over the ranks of each step */
  double seconds, optimizer_seconds;
} tally_t;

/* One training, and what came of it. */
typedef struct training {
  const train_options_t *options;
  const text_t *text;
  const team_t *team;
  int optimizer_kind; /* ADAM or ONEBIT_ADAM */
  transformer_t *model;
  onebit_optimizer_t optimizer;
  unsigned char *tokens; /* [batch][context + 1] */
  tally_t tally[2];      /* of each onebit_stage_t */
  double validation_loss;
} training_t;

static const char *const optimizer_names[] = {"dense Adam", "1-bit Adam"};
static const char *const stage_names[] = {"warm-up", "compressed"};

/* --- One training ------------------------------------------------------------------------------*/

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

static onebit_status_t create_optimizer(training_t *training) {
  const train_options_t *options = training->options;
  const transformer_t *model = training->model;
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta2 = options->beta2;
  adam.freeze_step = training->optimizer_kind == ADAM ? ONEBIT_FREEZE_NEVER : options->freeze;
  adam.scale = (onebit_scale_t)options->scale;
  adam.block_size = options->block_size;
  adam.no_error_feedback = options->no_error_feedback;
  onebit_tensor_t *tensors = calloc(model->ntensors, sizeof *tensors);
  for (size_t t = 0; tensors && t < model->ntensors; t++)
    tensors[t] = (onebit_tensor_t){
        .parameter = model->tensors[t].value,
        .gradient = model->tensors[t].gradient,
        .count = model->tensors[t].count,
        .weight_decay = model->tensors[t].is_gain ? 0.0f : options->weight_decay,
    };
  const onebit_status_t status = onebit_adam_create(training->team->comm, tensors, model->ntensors,
                                                    &adam, &training->optimizer);
  free(tensors);
  return status;
}

static int create(training_t *training) {
  const train_options_t *options = training->options;
  const transformer_shape_t shape = {training->text->vocabulary,
                                     options->context,
                                     options->width,
                                     options->heads,
                                     options->layers,
                                     options->batch};
  training->model = transformer_create(&shape);
  training->tokens = malloc(options->batch * (options->context + 1));
  if (agree(training->team, training->model && training->tokens,
            "out of memory for the model; a smaller --batch, --context or --width needs less") != 0)
    return -1;
  transformer_initialise(training->model, options->seed);
  return check(training->team, create_optimizer(training), "optimizer");
}

static void destroy(training_t *training) {
  onebit_optimizer_destroy(training->optimizer);
  transformer_destroy(training->model);
  free(training->tokens);
}

static onebit_optimizer_info_t information(const training_t *training) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_optimizer_get_info(training->optimizer, &info);
  return info;
}

/* The gradient of this rank's own sequences, and the loss over those of all ranks. */
static int compute_gradient(training_t *training, size_t step, double *loss) {
  const train_options_t *options = training->options;
  uint64_t random = random_stream(options->seed, 1 + training->team->rank, step);
  float numbers[NUMBERS] = {0};
  text_sample(training->text, options->batch, options->context + 1, &random, training->tokens);
  transformer_forward(training->model, training->tokens, options->batch);
  numbers[0] = (float)transformer_loss(training->model, training->tokens, options->batch);
  transformer_backward(training->model, training->tokens, options->batch);
  const int result = mean(training->team, numbers, "mean of the loss");
  *loss = (double)numbers[0];
  return result;
}

/* The exchange of the loss lines the ranks up, so that the optimizer's time is not time of waiting
 * for a slower rank. */
static int take_step(training_t *training, size_t step, tally_t *tally) {
  const double start = now();
  *tally = (tally_t){.steps = 1};
  if (compute_gradient(training, step, &tally->loss) != 0)
    return -1;
  const uint64_t sent = onebit_comm_bytes_sent(training->team->comm);
  const double middle = now();
  const onebit_status_t status =
      onebit_optimizer_step(training->optimizer, learning_rate(training->options, step));
  const double end = now();
  tally->bytes = onebit_comm_bytes_sent(training->team->comm) - sent;
  tally->seconds = end - start;
  tally->optimizer_seconds = end - middle;
  return status == ONEBIT_SKIPPED ? 0 : check(training->team, status, "optimizer step");
}

static void add(tally_t *sum, const tally_t *tally) {
  sum->steps += tally->steps;
  sum->bytes += tally->bytes;
  sum->loss += tally->loss;
  sum->seconds += tally->seconds;
  sum->optimizer_seconds += tally->optimizer_seconds;
}

static double per_step(const tally_t *tally, double sum) {
  return tally->steps > 0 ? sum / (double)tally->steps : 0.0;
}

static void print_progress(const training_t *training, size_t step, onebit_stage_t stage,
                           const tally_t *since) {
  const train_options_t *options = training->options;
  const size_t tokens = since->steps * training->team->size * options->batch * options->context;
  say(training->team, "%6zu  %-10s  %7.4f  %13.2e  %8.0f  %14.0f\n", step,
      training->optimizer_kind == ADAM ? "dense" : stage_names[stage], per_step(since, since->loss),
      (double)learning_rate(options, step - 1), (double)tokens / since->seconds,
      per_step(since, (double)since->bytes));
}

static int take_steps(training_t *training) {
  const size_t steps = training->options->steps, report_every = training->options->report_every;
  onebit_stage_t stage = ONEBIT_STAGE_WARMUP;
  tally_t since = {0}, one;
  say(training->team,
      "\n%s, %zu parameters in %zu tensors\n"
      "  step  stage          loss  learning rate  tokens/s  sent/rank/step\n",
      optimizer_names[training->optimizer_kind], training->model->parameters,
      training->model->ntensors);
  for (size_t step = 1; step <= steps; step++) {
    if (take_step(training, step - 1, &one) != 0)
      return -1;
    add(&training->tally[stage], &one);
    add(&since, &one);
    if (step % report_every == 0 || step == steps) {
      print_progress(training, step, stage, &since);
      since = (tally_t){0};
    }
    if (stage == ONEBIT_STAGE_WARMUP)
      stage = information(training).stage;
  }
  return 0;
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
    transformer_forward(training->model, training->tokens, filled);
    sum += (double)filled * transformer_loss(training->model, training->tokens, filled);
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

/* FNV-1a. */
static uint64_t hash(uint64_t start, const void *data, size_t size) {
  const unsigned char *bytes = data;
  uint64_t h = start ^ 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++)
    h = (h ^ bytes[i]) * 0x100000001b3u;
  return h;
}

static int check_parameters(const training_t *training) {
  const transformer_t *model = training->model;
  uint64_t sum = 0;
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
static void generate(const training_t *training) {
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
    transformer_forward(training->model, tokens, 1);
    const float *next = training->model->next + (context - 1) * text->vocabulary;
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
  const onebit_optimizer_info_t info = information(training);
  printf("bytes sent per rank and step: %.0f dense", dense_bytes);
  if (bits->steps > 0 && training->team->size > 1)
    printf(", %.0f compressed (1/%.2f)", compressed_bytes, dense_bytes / compressed_bytes);
  if (bits->steps > 0)
    printf("; kept error / momentum: %.2f", info.error_norm / info.momentum_norm);
  printf("; steps skipped: %llu\n", (unsigned long long)info.skipped);
}

static int train(training_t *training) {
  int result = create(training);
  if (result == 0)
    result = take_steps(training);
  if (result == 0)
    result = validate(training);
  if (result == 0)
    result = check_parameters(training);
  if (result == 0 && training->team->rank == 0) {
    print_compression(training);
    generate(training);
  }
  destroy(training);
  return result;
}

/* --- One rank's run ----------------------------------------------------------------------------*/

/* Of 1-bit Adam the compressed stage, of dense Adam all steps. */
static const tally_t *steady(const training_t *training) {
  const tally_t *compressed = &training->tally[ONEBIT_STAGE_COMPRESSED];
  return compressed->steps > 0 ? compressed : &training->tally[ONEBIT_STAGE_WARMUP];
}

static void print_row(const char *what, const char *format, double dense, double bits) {
  char left[32], right[32];
  snprintf(left, sizeof left, format, dense);
  snprintf(right, sizeof right, format, bits);
  printf("%-34s %12s %12s %12.4f\n", what, left, right, bits / dense);
}

static void print_table(const training_t *dense, const training_t *bits) {
  const tally_t *a = steady(dense), *b = steady(bits);
  printf("\n%-34s %12s %12s %12s\n", "", optimizer_names[ADAM], optimizer_names[ONEBIT_ADAM],
         "ratio");
  print_row("validation loss", "%.4f", dense->validation_loss, bits->validation_loss);
  print_row("bytes sent per rank and step *", "%.0f", per_step(a, (double)a->bytes),
            per_step(b, (double)b->bytes));
  print_row("milliseconds per step *", "%.2f", 1e3 * per_step(a, a->seconds),
            1e3 * per_step(b, b->seconds));
  print_row("  of them in the optimizer *", "%.2f", 1e3 * per_step(a, a->optimizer_seconds),
            1e3 * per_step(b, b->optimizer_seconds));
  printf("* of 1-bit Adam in its compressed stage, after %zu steps of dense warm-up\n",
         bits->tally[ONEBIT_STAGE_WARMUP].steps);
}

/* The same text everywhere, and enough of it: a window to learn from and one to hold out. */
static int check_text(const team_t *team, const train_options_t *options, const text_t *text) {
  char words[TEXT_WORDS];
  snprintf(words, sizeof words,
           "--data: %zu bytes are too short for --context %zu: a tenth is held out, and each part "
           "must be longer than the context",
           text->length, options->context);
  if (agree(team, text->length / 10 > options->context, words) != 0)
    return -1;
  return agree(team, same(team, hash(text->vocabulary, text->tokens, text->length)),
               "--data: the ranks read different texts");
}

static int train_all(const team_t *team, const train_options_t *options, const text_t *text) {
  training_t trainings[2];
  for (int kind = ADAM; kind <= ONEBIT_ADAM; kind++) {
    trainings[kind] =
        (training_t){.options = options, .text = text, .team = team, .optimizer_kind = kind};
    if ((options->compare || kind == options->optimizer) && train(&trainings[kind]) != 0)
      return FAILED;
  }
  if (options->compare && team->rank == 0)
    print_table(&trainings[ADAM], &trainings[ONEBIT_ADAM]);
  return DONE;
}

static int load_and_train(const team_t *team, const train_options_t *options) {
  text_t text;
  char words[TEXT_WORDS];
  const int loaded = text_load(&text, options->data, options->ndata, words);
  int result = WRONG_USE;
  if (agree(team, loaded == 0, words) == 0 && check_text(team, options, &text) == 0) {
    say(team, "%zu ranks; %zu bytes of text from %zu files, of %zu kinds\n", team->size,
        text.length, text.files, text.vocabulary);
    result = train_all(team, options, &text);
  }
  text_free(&text);
  return result;
}

/* What the command line asks for. */
typedef struct command {
  train_options_t options;
  int wrong; /* nonzero: words say what is */
  char words[OPTION_WORDS];
} command_t;

static int run_rank(const team_t *team, const void *context) {
  const command_t *command = context;
  if (command->wrong)
    complain(team, command->words);
  else if (!command->options.help)
    return load_and_train(team, &command->options);
  else if (team->rank == 0)
    train_options_print_help();
  return command->wrong ? WRONG_USE : DONE;
}

int main(int argc, char **argv) {
  command_t command;
  setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
  command.wrong = train_options_parse(&command.options, argc, argv, command.words);
  return team_run(command.wrong ? 0 : command.options.ranks, run_rank, &command);
}
