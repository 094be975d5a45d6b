/* The clock that measures durations. */
#ifndef OB_BASE_CLOCK_H
#define OB_BASE_CLOCK_H

/* Seconds since some moment in the past; never goes back. A call takes some 20 nanoseconds. */
double ob_seconds(void);

#endif
