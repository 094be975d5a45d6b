/*
 * Makes one mistake after another, on two ranks that are threads. For each mistake it prints the
 * library's message, one line per rank. docs/troubleshooting.md quotes these messages, and
 * tests/scripts/check-guides compares them with the quotes.
 */
#include <math.h>
#include <onebit/onebit.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 3000, RANKS = 2 };

struct rank {
  onebit_comm_t comm;
  int number;
  float parameter[COUNT], gradient[COUNT], result[COUNT];
  onebit_tensor_t tensor;
  onebit_adam_options_t options;
  float rate;
  onebit_status_t status;
  char words[400];
};

static void note_status(struct rank *rank, onebit_status_t status) {
  rank->status = status;
  snprintf(rank->words, sizeof rank->words, "%s",
           status == ONEBIT_OK ? "no words" : onebit_last_error());
}

/* Creates an optimizer and makes a step, and stores the first error message. */
static void make_step(struct rank *rank) {
  onebit_optimizer_t optimizer = NULL;
  onebit_status_t status =
      onebit_adam_create(rank->comm, &rank->tensor, 1, &rank->options, &optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(optimizer, rank->rate);
  note_status(rank, status);
  onebit_optimizer_destroy(optimizer);
}

static void pass_other_counts(struct rank *rank) {
  rank->tensor.count = rank->number ? COUNT - 1000 : COUNT;
  make_step(rank);
}

static void pass_other_options(struct rank *rank) {
  rank->options.freeze_step = rank->number ? 200 : 100;
  make_step(rank);
}

static void pass_no_options(struct rank *rank) {
  rank->options.size = 0;
  make_step(rank);
}

static void pass_other_rates(struct rank *rank) {
  rank->rate = rank->number ? 0.002F : 0.001F;
  make_step(rank);
}

static void pass_not_a_number(struct rank *rank) {
  rank->gradient[17] = rank->number ? NAN : 0;
  make_step(rank);
}

static void pass_overlapping_buffers(struct rank *rank) {
  onebit_plan_t plan = NULL;
  onebit_status_t status = onebit_plan_create(rank->comm, COUNT / 2, NULL, &plan);
  if (status == ONEBIT_OK)
    status =
        onebit_allreduce(rank->gradient, rank->number ? rank->gradient + 1 : rank->result, plan);
  note_status(rank, status);
  onebit_plan_destroy(plan);
}

static void load_another_checkpoint(struct rank *rank) {
  onebit_optimizer_t optimizer = NULL;
  static char part[RANKS][100000];
  const void *parts[] = {part[rank->number]};
  size_t bytes = 0;
  onebit_status_t status =
      onebit_adam_create(rank->comm, &rank->tensor, 1, &rank->options, &optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_save(optimizer, part[rank->number], sizeof part[0], &bytes);
  onebit_optimizer_destroy(optimizer);
  rank->tensor.count = COUNT - 1;
  if (status == ONEBIT_OK)
    status = onebit_adam_create(rank->comm, &rank->tensor, 1, &rank->options, &optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_load(optimizer, parts, &bytes, 1);
  note_status(rank, status);
  onebit_optimizer_destroy(optimizer);
}

/* Makes steps in which the residual grows larger than the signal, because elements of very
 * different size share one scale. */
static void outgrow_residual(struct rank *rank) {
  onebit_optimizer_t optimizer = NULL;
  rank->options.freeze_step = 1;
  rank->options.beta2 = 0.5;
  rank->options.common.block_size = ONEBIT_BLOCK_BUFFER;
  rank->options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  for (int i = 0; i < COUNT; i++)
    rank->gradient[i] = i < 3 ? 100.0F : 0.01F;
  onebit_status_t status =
      onebit_adam_create(rank->comm, &rank->tensor, 1, &rank->options, &optimizer);
  for (int step = 0; step < 40 && status == ONEBIT_OK; step++)
    status = onebit_optimizer_step(optimizer, 1e-3F);
  note_status(rank, status == ONEBIT_OK ? onebit_optimizer_check(optimizer, NULL) : status);
  onebit_optimizer_destroy(optimizer);
}

static void (*const cases[])(struct rank *) = {
    pass_other_counts, pass_other_options,       pass_no_options,         pass_other_rates,
    pass_not_a_number, pass_overlapping_buffers, load_another_checkpoint, outgrow_residual};
static size_t chosen;

static void *run_case(void *argument) {
  cases[chosen](argument);
  return NULL;
}

int main(void) {
  static struct rank ranks[RANKS];
  for (chosen = 0; chosen < sizeof cases / sizeof *cases; chosen++) {
    onebit_comm_t comms[RANKS];
    pthread_t threads[RANKS];
    if (onebit_comm_create_loopback(RANKS, comms) != ONEBIT_OK)
      return 1;
    for (int k = 0; k < RANKS; k++) {
      ranks[k] = (struct rank){.comm = comms[k], .number = k, .rate = 1e-3F};
      ranks[k].options = (onebit_adam_options_t)ONEBIT_ADAM_OPTIONS_INIT;
      ranks[k].tensor = (onebit_tensor_t){
          .parameter = ranks[k].parameter, .gradient = ranks[k].gradient, .count = COUNT};
      if (pthread_create(&threads[k], NULL, run_case, &ranks[k]))
        return 1;
    }
    for (int k = 0; k < RANKS; k++) {
      pthread_join(threads[k], NULL);
      onebit_comm_destroy(comms[k]);
      printf("%s: %s\n", onebit_status_string(ranks[k].status), ranks[k].words);
    }
  }
  return 0;
}
