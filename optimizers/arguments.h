/*
 * Checks an optimizer's arguments: its options, and the caller's tensors. Each gives ONEBIT_OK, or
 * a status with its error message.
 */
#ifndef OB_OPTIMIZERS_ARGUMENTS_H
#define OB_OPTIMIZERS_ARGUMENTS_H

#include "optimizers/method.h"
#include "optimizers/optimizer.h"

/* Checks the options that all optimizers have. */
onebit_status_t ob_check_common(const onebit_optimizer_options_t *options);

/* Checks that this method can be compressed as its options ask, in so many bits. */
onebit_status_t ob_check_recipe(const struct ob_recipe *recipe, int bits, int max_bits);

/* Checks an array of a tensor: `name` is "parameter" or "gradient". */
onebit_status_t ob_check_array(const struct ob_optimizer_executor *executor, const char *name,
                               size_t tensor, const void *array, onebit_dtype_t dtype);

/* Checks all tensors, whose arrays may not overlap. ONEBIT_ERROR_MEMORY too. */
onebit_status_t ob_check_tensors(const struct onebit_optimizer *optimizer,
                                 const onebit_tensor_t *tensors, size_t count);

#endif
