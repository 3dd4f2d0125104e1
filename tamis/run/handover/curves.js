// What the curves of the report and of the live page share: the switches, and smoothing.
"use strict";
const control = name => document.getElementById(name);
const smoothingShare = () => Number(control("smoothing").value);
const isLog = positive => positive && control("log").checked;

// A mean over neighbours whose weights fall off exponentially, corrected for the first ones.
function smoothed(values, share) {
  let sum = 0, weight = 0;
  return values.map(value => {
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}
