/* The median, with which programs summarise their measurements. */
#ifndef TOOLS_MEDIAN_H
#define TOOLS_MEDIAN_H

/* Sorts the values and returns the median. The median of no values is 0. */
double tool_median(double *values, int count);

#endif
