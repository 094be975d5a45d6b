/*
 * Metrics of a training, where ONEBIT_METRICS names a file: a row each ONEBIT_METRICS_EVERY steps.
 */
#ifndef OB_OPTIMIZERS_METRICS_H
#define OB_OPTIMIZERS_METRICS_H

#include "optimizers/optimizer.h"

/* Opens the file where this rank writes one; optimizer->metrics is NULL where it does not.
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE, ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_metrics_open(onebit_optimizer_t optimizer);

/* A call of step has ended with that status: writes a row where one is due. One that failed is no
 * step, and its error message stays. What cannot be written is warned of, once, and the metrics
 * end. */
void ob_metrics_step(onebit_optimizer_t optimizer, float learning_rate, onebit_status_t status);

void ob_metrics_close(onebit_optimizer_t optimizer);

#endif
