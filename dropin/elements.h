/*
 * Arithmetic on arrays of the element types. Each result is rounded to the type's own precision.
 * MPI lacks these functions: multiplication by a number, and sums of types that MPI does not have.
 */
#ifndef OB_DROPIN_ELEMENTS_H
#define OB_DROPIN_ELEMENTS_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/plan.h"

/* Types that plans do not support. Doubles are sent as floats; calls of the other types are
 * counted, but never compressed. */
#define OB_DOUBLE     ((onebit_dtype_t)3)
#define OB_OTHER_TYPE ((onebit_dtype_t)4)

size_t ob_elements_size(onebit_dtype_t dtype);

/* Reads values as floats. */
void ob_elements_read(onebit_dtype_t dtype, float *to, const void *from, size_t count);

/* to[i] = from[i] * factor. `to` and `from` may be the same array. */
void ob_elements_multiply(onebit_dtype_t dtype, void *to, const void *from, size_t count,
                          float factor);

/* to[i] = to[i] / divisor, rounded to the nearest value of the type. */
void ob_elements_divide(onebit_dtype_t dtype, void *to, size_t count, float divisor);

/* Converts doubles to floats. Returns false if a value is not finite, or if the largest is beyond
 * what floats hold with their precision. */
bool ob_elements_narrow(float *to, const double *from, size_t count);

/* to[i] = from[i] * factor. */
void ob_elements_widen(double *to, const float *from, size_t count, double factor);

/* to[i] = to[i] + from[i]. */
void ob_elements_add(onebit_dtype_t dtype, void *to, const void *from, size_t count);

/* Returns the Euclidean norm. */
double ob_elements_norm(const float *values, size_t count);

#endif
