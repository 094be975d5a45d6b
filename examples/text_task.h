/*
 * A transformer that learns a text, as a task of train_task.h.
 */
#ifndef EXAMPLES_TEXT_TASK_H
#define EXAMPLES_TEXT_TASK_H

#include "examples/text.h"
#include "examples/text_options.h"
#include "examples/train_task.h"

/* Its options are text_options_t, its data a text_t. */
extern const train_kind_t text_kind;

#endif
