/*
 * A transformer that learns a text, as a task of train_task.h.
 */
#ifndef EXAMPLES_TEXT_TASK_H
#define EXAMPLES_TEXT_TASK_H

#include "examples/text.h"
#include "examples/text_device.h"
#include "examples/train_task.h"

/* What the tasks are made of. */
typedef struct text_data {
  const text_t *text;
  const text_device_t *device;
} text_data_t;

/* Its options are text_options_t, its data text_data_t. */
extern const train_kind_t text_kind;

#endif
