/* The tasks of train_task.h, as far as their kinds do not differ. */
#include "examples/train_task.h"

enum tool_asked train_options_parse(const train_kind_t *kind, train_options_t *options, int argc,
                                    char **argv, char words[TRAIN_WORDS]) {
  *options = *(const train_options_t *)kind->tool->defaults;
  const enum tool_asked asked = tool_parse(kind->tool, &argc, argv, options, words);
  if (asked != TOOL_RUN)
    return asked;
  train_options_complete(options, kind->learning_rates);
  return kind->check(options, words) == 0 && train_options_check(options, words) == 0 ? TOOL_RUN
                                                                                      : TOOL_WRONG;
}

int train_task_create(train_task_t *task) {
  char words[TRAIN_WORDS];
  snprintf(words, sizeof words, "out of memory; a smaller %s needs less", task->kind->smaller);
  task->model = task->kind->create(task);
  return agree(task->team, task->model != NULL, words);
}

double train_task_gradient(train_task_t *task, size_t micro_batch) {
  const size_t batch = task->options->batch;
  model_t *model = task->model;
  task->kind->draw(task, micro_batch);
  model->forward(model, batch);
  const double loss = model_loss(model, batch);
  model->backward(model, batch);
  return loss;
}

/* Sums the loss and the right answers on this rank's held-out samples: every size-th. */
static void evaluate(const train_task_t *task, size_t samples, float numbers[NUMBERS]) {
  const train_kind_t *kind = task->kind;
  double loss = 0.0, correct = 0.0;
  for (size_t sample = task->team->rank; sample < samples;) {
    size_t filled = 0;
    for (; filled < task->options->batch && sample < samples; sample += task->team->size)
      kind->hold(task, filled++, sample);
    task->model->forward(task->model, filled);
    loss += (double)filled * model_loss(task->model, filled);
    correct += kind->classifies ? (double)model_correct(task->model, filled) : 0.0;
  }
  numbers[0] = (float)loss;
  numbers[1] = (float)correct;
}

int train_task_validate(train_task_t *task, train_quality_t *quality) {
  const train_kind_t *kind = task->kind;
  const size_t samples = kind->held_out(task);
  const double part = (double)task->team->size / (double)samples;
  float numbers[NUMBERS] = {0};
  evaluate(task, samples, numbers);
  if (mean(task->team, numbers, "validation") != 0)
    return -1;
  quality->loss = (double)numbers[0] * part;
  quality->accuracy = kind->classifies ? (double)numbers[1] * part : -1.0;
  if (kind->classifies)
    say(task->team, "accuracy %.2f %%, loss %.4f, of %zu %s\n", 100.0 * quality->accuracy,
        quality->loss, samples, kind->held_out_name);
  else
    say(task->team, "validation loss %.4f over %zu %s\n", quality->loss,
        samples * task->model->rows, kind->held_out_name);
  return 0;
}

uint64_t train_task_checksum(const train_task_t *task) {
  const model_t *model = task->model;
  uint64_t sum = 0;
  for (size_t t = 0; t < model->ntensors; t++)
    sum = train_hash(sum, model->tensors[t].value, model->tensors[t].count * sizeof(float));
  return sum;
}

uint64_t train_hash(uint64_t start, const void *data, size_t size) {
  const unsigned char *bytes = data;
  uint64_t h = start ^ 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++)
    h = (h ^ bytes[i]) * 0x100000001b3u;
  return h;
}
