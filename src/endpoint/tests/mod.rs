mod outcomes;
