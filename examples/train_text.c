/*
 * train_text: data-parallel training of a character-level transformer with dense or 1-bit Adam.
 *
 *   mpirun -n 4 train_text --data /usr/share/common-licenses --compare
 *   mpirun -n 8 train_text --data /usr/share/common-licenses --compare --device cuda
 *
 * Each rank draws its own sequences and computes its own gradients; onebit_optimizer_step exchanges
 * them and updates the parameters, which stay equal on all ranks to the last bit. Dense Adam is the
 * same optimizer, never frozen. The same seed gives the same run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/train_run.h"

enum { DONE = 0, FAILED = 1, WRONG_USE = 2 }; /* exit statuses */

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

static int train_all(const team_t *team, const train_device_t *device,
                     const train_options_t *options, const text_t *text) {
  training_t trainings[3];
  for (int kind = ADAM; kind <= DENSE_MPI; kind++) {
    const int wanted = options->compare ? kind <= ONEBIT_ADAM : kind == options->optimizer;
    trainings[kind] = (training_t){
        .options = options, .text = text, .team = team, .device = device, .optimizer_kind = kind};
    if (wanted && train(&trainings[kind]) != 0)
      return FAILED;
  }
  if (options->compare && team->rank == 0)
    print_table(&trainings[ADAM], &trainings[ONEBIT_ADAM]);
  return DONE;
}

static int train_on_device(team_t *team, const train_device_t *device,
                           const train_options_t *options, const text_t *text) {
  const int opened = device->open(team, options);
  const int result = opened == 0 ? train_all(team, device, options, text) : FAILED;
  device->close(team);
  return result;
}

static int load_and_train(team_t *team, const train_options_t *options) {
  text_t text;
  char words[TEXT_WORDS];
  const int loaded = text_load(&text, options->data, options->ndata, words);
  const train_device_t *device = train_device(options);
  int result = WRONG_USE;
  const int well = options->optimizer != DENSE_MPI || options->compare || team->has_mpi;
  if (agree(team, well, "--optimizer dense-mpi: wants ranks that are MPI's processes") == 0 &&
      agree(team, device != NULL, "--device cuda: this program was built without CUDA") == 0 &&
      agree(team, loaded == 0, words) == 0 && check_text(team, options, &text) == 0) {
    say(team, "%zu ranks; %zu bytes of text from %zu files, of %zu kinds\n", team->size,
        text.length, text.files, text.vocabulary);
    result = train_on_device(team, device, options, &text);
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

static int run_rank(team_t *team, const void *context) {
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
