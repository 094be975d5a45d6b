/*
 * A network that learns to read images, as a task of train_task.h.
 */
#ifndef EXAMPLES_IMAGE_TASK_H
#define EXAMPLES_IMAGE_TASK_H

#include "examples/train_task.h"

/* Its options are image_options_t, its data images_t. */
extern const train_kind_t image_kind;

#endif
