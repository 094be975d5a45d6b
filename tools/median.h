/* The median, by which programs sum up what they measured. */
#ifndef TOOLS_MEDIAN_H
#define TOOLS_MEDIAN_H

/* Sorts the values. The median of none is 0. */
double tool_median(double *values, int count);

#endif
