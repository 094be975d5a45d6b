/*
 * A log-bilinear model that learns the words of a text, as a task of train_task.h.
 */
#ifndef EXAMPLES_WORD_TASK_H
#define EXAMPLES_WORD_TASK_H

#include "examples/train_task.h"

/* Its options are word_options_t, its data words_t. */
extern const train_kind_t word_kind;

#endif
